"""What is being done before models can be used can be asked at any time."""

from __future__ import annotations

from modelpool import ModelPool
from modelpool.config import PoolConfig
from modelpool.progress import LoadProgress


class Told(LoadProgress):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, str]] = []
        self.shown: list[str] = []

    def begin(self, stage: str, model: str) -> None:
        super().begin(stage, model)  # type: ignore[arg-type]
        self.steps.append((stage, model))

    def count(self, done_bytes: int, total_bytes: int) -> None:
        super().count(done_bytes, total_bytes)
        self.shown.append(str(self.step))


def test_a_pool_tells_what_it_reads_and_loads() -> None:
    told = Told()
    models = [{"name": name, "source": f"bundled:tiny-{name}"} for name in ("1m", "8m")]
    config = PoolConfig.model_validate({"target": "8m", "models": models})
    pool = ModelPool(config, progress=told)
    assert told.steps == [("reading", "1m"), ("reading", "8m")]
    pool.get("1m")
    assert told.steps[2] == ("loading", "1m")


def test_the_bytes_of_weights_that_are_loaded_are_counted() -> None:
    told = Told()
    model = {"name": "8m", "source": "bundled:tiny-8m", "weights": "int8"}
    pool = ModelPool(PoolConfig.model_validate({"target": "8m", "models": [model]}), progress=told)
    pool.get("8m")
    total = f"{pool.plan('8m').footprint.weight_bytes / 1e6:.1f}"
    loading = [line for line in told.shown if line.startswith("loading")]
    assert loading[0] == f"loading 8m, 0.0 of {total} MB"
    assert loading[-1] == f"loading 8m, {total} of {total} MB"
    done = [float(line.split()[2]) for line in loading]
    assert done == sorted(done)
    assert len(set(done)) > 10
    assert told.shown[-1] == f"packing 8m, {total} of {total} MB"
    assert told.steps[-1] == ("checking", "8m"), "what is counted is done, but not all"
