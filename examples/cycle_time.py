"""Where a decoding cycle's time goes: `python -m examples.cycle_time`.

The bundled target, inflated to at least 200M parameters, verifies token trees that the smaller
models draft for a batch of requests. Time is split into the models' forwards, the work on logits
(noise, penalties, softmax, top-k), and all the rest: building trees, masks, selection, walks,
commits, rollbacks, and the engine around them. Sampled requests, temperature 1. The last line is
JSON.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from modelpool import ModelPool
from modelpool.inflate import inflate_to
from modelpool.packed_model import PackedModel
from processors import Sampler
from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.cli import default_config
from specrouter.config import RouterConfig
from specrouter.engine import Engine
from statemgr import ForwardView

PROMPT = "def fibonacci(n):\n"
_PARTS = (
    (Engine, "_step", "cycle"),
    (PackedModel, "_forward", "forwards"),
    (ForwardView, "mask", "masks"),  # built inside the forwards, but bookkeeping
    *((Sampler, name, "logits") for name in ("choose", "rank", "judge", "extend")),
)


@contextmanager
def split_times() -> Iterator[dict[str, float]]:
    """Seconds per part, while it is entered."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(original: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*arguments, **named)
            finally:
                seconds[part] += time.perf_counter() - started

        return call

    patches = [mock.patch.object(c, n, timed(getattr(c, n), part)) for c, n, part in _PARTS]
    for patch in patches:
        patch.start()
    try:
        yield seconds
    finally:
        for patch in patches:
            patch.stop()


def open_router(folder: Path, parameters: int, batch: int) -> ChainRouter:
    bundled = RouterConfig.load(default_config()).pool
    target = bundled.target
    inflate_to(ModelPool.from_config(bundled).path(target), folder / "target", parameters)
    models: list[dict[str, str]] = [
        {"name": model.name, "source": model.source, "dtype": "float32"}
        for model in bundled.models
        if model.name != target
    ]
    models.append({"name": target, "source": str(folder / "target"), "dtype": "bfloat16"})
    return ChainRouter.from_config(
        {"pool": {"target": target, "models": models}, "engine": {"max_requests": batch}}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parameters", type=int, default=200_000_000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    params = [
        SamplingParams(
            max_new_tokens=options.new_tokens, temperature=1.0, seed=seed, ignore_eos=True
        )
        for seed in range(options.batch)
    ]
    figures = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        open_router(Path(folder), options.parameters, options.batch) as router,
    ):
        target = router.pool.target
        for chain in (("tiny-1m", target), ("tiny-1m", "tiny-3m", target)):
            wish = Speculation(chain, options.depth, options.width)
            router.generate([PROMPT] * options.batch, params, wish)  # warms up
            with split_times() as seconds:
                outputs = router.generate([PROMPT] * options.batch, params, wish)
            cycle = seconds["cycle"]
            rest = cycle - seconds["forwards"] - seconds["logits"] + seconds["masks"]
            cycles = max(output.metrics.cycles for output in outputs)
            figures[">".join(chain)] = {
                "cycle_ms": 1000 * cycle / cycles,
                "forwards_share": (seconds["forwards"] - seconds["masks"]) / cycle,
                "logits_share": seconds["logits"] / cycle,
                "bookkeeping_share": rest / cycle,
            }
            print(f"{'>'.join(chain)}: bookkeeping {rest / cycle:.1%} of {cycles} cycles")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
