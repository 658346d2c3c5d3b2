"""Where the time of a token goes: one request on the target alone, part by part.

    python -m research.studies.token_profile [--config FILE] [--weights int8]
        [--batches 1 16] [--rounds 9]

A pass of the target reads all of its weights, so memory permits no more than its speed over their
bytes (`specrouter check` says how many). Shown is how much of that is reached, and what the rest is
spent on: by kind of layer with the speed at which it reads its own weights, attention, norms, and
the engine's own work around the pass. Each round measures the memory, serves requests, and serves
them again with a clock around each part, which costs some microseconds a layer. Medians over
rounds, without the prompts. The last line is one JSON document.
"""

import argparse
import copy
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelpool import ModelPool
from modelpool.fast.direct_forward import DirectForward
from modelpool.fast.lean_forward import LeanForward
from modelpool.fast.memory_speed import read_bytes_per_s
from modelpool.packed_model import PackedModel
from research.studies.engines import target_settings
from specrouter import ChainRouter, SamplingParams
from specrouter.bench.conditions import cpu_name
from specrouter.cli.arguments import default_config

_PROMPT = "def fibonacci(n):\n"
_PASS = "pass of the target"

# By attribute, what the parts of a layer are called, and those of a forward.
_OF_LAYERS = {
    "before": "norms", "qkv": "query, key, value", "head_norms": "norms", "rotate": "rotation",
    "out": "output of attention", "between": "norms", "gate_up": "gate, up", "gate": "activation",
    "down": "down",
}  # fmt: skip
_PARTS = {
    "_norm": "norms", "_head": "head", "_write": "keys and values", "_attend": "attention",
    "_rotary": "rotation", "_compiled": "layers and head in C",
}  # fmt: skip

Figures = dict[str, float]


class PartTimes:
    """A clock around the parts of a forward, of which several may have one name."""

    def __init__(self) -> None:
        self.ms: Counter[str] = Counter()

    def __call__(self, name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            started = time.perf_counter()
            found = part(*given)
            self.ms[name] += (time.perf_counter() - started) * 1000  # type: ignore[assignment]
            return found

        if hasattr(part, "add_to"):  # a linear layer
            vars(timed)["add_to"] = self(name, part.add_to)
        return timed


def watched(forward: Any, watch: Callable[..., Any]) -> Any:
    """A copy whose parts are called as `watch(name, part)` returns them: operators, and hence bits,
    are the same."""
    other = copy.copy(forward)
    other._layers = tuple(
        replace(layer, **_watched_parts(layer, _OF_LAYERS, watch)) for layer in forward._layers
    )
    vars(other).update(_watched_parts(forward, _PARTS, watch))
    return other


def _watched_parts(of: Any, names: dict[str, str], watch: Callable[..., Any]) -> dict[str, Any]:
    there = {field: getattr(of, field, None) for field in names}
    return {field: watch(names[field], part) for field, part in there.items() if part is not None}


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    settings = target_settings(options.config, options.weights, max(options.batches))
    settings["engine"].update(preload=False)  # no drafters
    with ChainRouter.from_config(settings) as router:
        router.set_policy("target-only")
        target = router.pool.get(router.pool.target)
        rows = [_row(router, target, batch, options) for batch in options.batches]
    print(json.dumps({"cpu": cpu_name(), "weights": options.weights, "rows": rows}))


def _row(
    router: ChainRouter, target: PackedModel, batch: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Of one batch size, shown and returned."""
    reads = router.pool.plan(target.name).read_bytes
    assert reads is not None, "the target's weights are not read whole"
    found = defaultdict[str, list[float]](list)
    _served(router, batch, options.new_tokens)
    for _ in range(options.rounds):
        speed = router.instruments.run_idle(lambda: read_bytes_per_s(target.threads))
        times = _served(router, batch, options.new_tokens)
        parts = _parts(router, target, batch, options.new_tokens)
        figures = {**times, **parts, "share": reads / speed * 1000 / times["token"]}
        for name, value in figures.items():
            found[name].append(value)
    medians = {name: statistics.median(values) for name, values in found.items()}
    _show(batch, medians, reads, bytes_by_part(router.pool, target))
    spread = [min(found["share"]), max(found["share"])]
    return {"batch": batch, "ms": medians, "share": medians["share"], "least and most": spread}


def _served(router: ChainRouter, batch: int, new_tokens: int) -> Figures:
    """Milliseconds of a token, and of its cycle in parts."""
    before = router.instruments.statistics()
    params = [
        SamplingParams(max_new_tokens=new_tokens, seed=seed, ignore_eos=True)
        for seed in range(batch)
    ]
    outputs = router.generate([_PROMPT] * batch, params)
    after = router.instruments.statistics()
    cycles = after.cycles - before.cycles
    tpots = [output.metrics.tpot_ms for output in outputs]
    return {
        "token": statistics.mean(tpot for tpot in tpots if tpot is not None),
        _PASS: (sum(after.model_ms.values()) - sum(before.model_ms.values())) / cycles,
        "choosing": (after.logits_ms - before.logits_ms) / cycles,
        "control plane": (after.control_ms - before.control_ms) / cycles,
    }


def _parts(router: ChainRouter, target: PackedModel, batch: int, new_tokens: int) -> Figures:
    """Milliseconds of each part of a pass, which runs with a clock around it."""
    forward, clock = target.shortcut, PartTimes()
    assert isinstance(forward, DirectForward | LeanForward), "the target runs its modules"
    target.shortcut = watched(forward, clock)
    try:
        before = router.instruments.statistics().cycles
        whole = _served(router, batch, new_tokens)[_PASS]
        cycles = router.instruments.statistics().cycles - before
    finally:
        target.shortcut = forward
    parts = {f"  {name}": spent / cycles for name, spent in clock.ms.items()}
    return {**parts, "  rest of it": whole - sum(parts.values()), f"{_PASS}, with clocks": whole}


def bytes_by_part(pool: ModelPool, target: PackedModel) -> dict[str, int]:
    """Of the weights that each kind of layer reads in a pass."""
    core: Any = target.model
    width = 1 if pool.plan(target.name).weights == "int8" else core.dtype.itemsize
    parts: dict[str, int] = Counter()
    for layer in core.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        kinds = {
            "query, key, value": (attention.q_proj, attention.k_proj, attention.v_proj),
            "output of attention": (attention.o_proj,),
            "gate, up": (mlp.gate_proj, mlp.up_proj),
            "down": (mlp.down_proj,),
        }
        for name, linears in kinds.items():
            parts[f"  {name}"] += width * sum(_size(linear) for linear in linears)
    parts["  head"] = width * _size(core.lm_head)
    return parts


def _size(linear: Any) -> int:
    return int(linear.in_features * linear.out_features)


def _show(batch: int, ms: Figures, reads: int, weights: dict[str, int]) -> None:
    print(f"batch {batch}: {ms['share']:.2f} of what memory permits ({reads / 2**20:.0f} MiB)")
    for name, value in ms.items():
        if name == "share":
            continue
        speed = f"{weights[name] / value / 1e6:7.1f} GB/s" if name in weights else ""
        print(f"{name:32}{value:8.3f} ms  {value / ms['token']:6.1%}{speed}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=default_config("bench-cpu.yaml"))
    parser.add_argument("--weights", default="auto", choices=("auto", "int8"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=48)
    return parser


if __name__ == "__main__":
    main()
