"""What is being done before models can be used can be asked at any time."""

from __future__ import annotations

from modelpool import ModelPool
from modelpool.config import PoolConfig
from modelpool.progress import LoadProgress


class Told(LoadProgress):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, str]] = []

    def begin(self, stage: str, model: str) -> None:
        super().begin(stage, model)  # type: ignore[arg-type]
        self.steps.append((stage, model))


def test_a_pool_tells_what_it_reads_and_loads() -> None:
    told = Told()
    models = [{"name": name, "source": f"bundled:tiny-{name}"} for name in ("1m", "8m")]
    config = PoolConfig.model_validate({"target": "8m", "models": models})
    pool = ModelPool(config, progress=told)
    assert told.steps == [("reading", "1m"), ("reading", "8m")]
    pool.get("1m")
    assert told.steps[-1] == ("loading", "1m")
