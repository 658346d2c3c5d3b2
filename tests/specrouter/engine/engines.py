"""An engine over a small family that is stepped by the test, and requests for it."""

import copy
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelpool import ModelPool
from specrouter import RequestOutput, RouterConfig, SamplingParams
from specrouter.engine.engine import Engine
from specrouter.request.detokenizer import Detokenizer
from specrouter.request.handle import RequestHandle
from specrouter.request.objective import Objective
from specrouter.request.running import RunningRequest
from specrouter.request.spec import RequestSpec, SpeculationOverride
from test_support.factories import save_llama

PAIR = ("small", "target")
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
PROMPTS = ((5, 17, 300, 42, 9), (3, 4), (250, 1, 99), (8, 9, 10, 11))
_MOST_STEPS = 400


def changed(settings: dict[str, Any], look_up: str | None = None, **engine: Any) -> dict[str, Any]:
    """A copy, with a drafter that looks up tokens, such as `ngram`, and settings of the engine."""
    settings = copy.deepcopy(settings)
    if look_up is not None:
        settings["pool"]["models"].append({"name": look_up, "source": look_up})
    settings["engine"] |= engine
    return settings


def long_pool(folder: Path, positions: int) -> dict[str, Any]:
    """Settings of a pool: one random model of so many positions, 16 numbers a key."""
    path = save_llama(folder / "model", hidden=16, layers=1, heads=1, kv_heads=1, dtype="float32")
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = positions
    (path / "config.json").write_text(json.dumps(config))
    model = {"name": "target", "source": f"path:{path}", "dtype": "float32", "device": "cpu"}
    return {"target": "target", "models": [model]}


class EngineBench:
    """`engine` leaves its requests to `small>target`, so that it is known who drafts, unless the
    settings have a scheduler."""

    def __init__(self, settings: dict[str, Any], **engine: Any) -> None:
        settings = changed(settings, **{"max_requests": 3, **engine})
        settings.setdefault("scheduler", {"policy": "static", "chain": PAIR, "depth": 3})
        self.config = config = RouterConfig.load(settings)
        limit = config.engine.kv_limit or config.engine.kv_tokens
        self.pool = ModelPool.from_config(config.pool, kv_tokens=limit)
        self.engine = Engine(config, self.pool)
        self.engine.warm_up()
        self._ids = itertools.count(1)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        speculation: SpeculationOverride = None,
        objective: Objective | None = None,
    ) -> RequestHandle:
        spec = RequestSpec(
            token_ids=tuple(prompt),
            generated=(),
            params=params,
            speculation=speculation,
            seed=1,
            objective=objective,
        )
        handle = RequestHandle(next(self._ids), lambda: None)
        text = Detokenizer(self.pool.tokenizer, spec.params, spec.token_ids)
        request = RunningRequest(spec, handle, text, self.pool.eos_token_ids)
        self.engine.enqueue(request)
        return handle

    def finish(self, handles: Sequence[RequestHandle]) -> list[RequestOutput]:
        for _ in range(_MOST_STEPS):
            if all(handle.is_done for handle in handles):
                break
            self.engine.step()
        self.engine.check_integrity()
        return [handle.result(timeout=0) for handle in handles]

    def serve(self, speculation: SpeculationOverride = None) -> list[RequestOutput]:
        """The prompts, one more than there are rows."""
        return self.finish([self.submit(one, speculation=speculation) for one in PROMPTS])

    def chains(self) -> set[tuple[str, ...]]:
        """That a request goes through now."""
        [output] = self.finish([self.submit(PROMPTS[0])])
        return set(output.metrics.chains)

    def faults(self) -> dict[str, int]:
        """By part, of those that failed."""
        return {part: count for part, count in self.engine.state().control_faults.items() if count}
