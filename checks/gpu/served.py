"""A whole service on a GPU, for `checks.gpu.lease`: tokens/s of chains, and when the device idles.

One router for all of it: to load a model of 7B and to capture its graphs takes half a minute. The
arrangements take turns within a round, on the same prompts and seeds, and must say the same.
"""

import json
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from modelpool.checkpoint.cache_dir import cache_dir
from modelpool.checkpoint.source import resolve_source
from modelpool.fast.graph_runner import GraphRunner
from modelpool.inflate import inflate
from modelpool.inflate.llama_sizes import Growth
from modelpool.inflate.tensors import InflatedTensors
from specrouter import ChainRouter, SamplingParams
from specrouter.bench.prompts import BUILT_IN, Work, deal, tokenize
from specrouter.profile.profiler import EngineStatistics

CONFIG = Path(__file__).parents[2] / "configs" / "bench-gpu.yaml"
WIDE = Growth(width_exponent=2, layers=32, mlp=14336)  # of tiny-8m: 7.0B, 4,096 wide
ROUNDS = 2  # after one that is not counted
ON_GPU = torch.cuda.is_available()


class _DrawnOnDevice(InflatedTensors):
    """Draws what is new on the GPU: on a CPU, 5 billion numbers take a minute."""

    def _random(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, device="cuda" if ON_GPU else "cpu") * 0.02
        return drawn.to(self._dtype).cpu()


def bench_config(is_dry: bool) -> dict[str, Any]:
    """The file's, with a target as wide as a real one; dry: on the CPU, nothing inflated."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    for model in config["pool"]["models"]:
        if is_dry:
            model.pop("inflate_to", None)
            model |= {"device": "cpu", "dtype": "float32"}
        elif model["name"] == config["pool"]["target"]:
            del model["inflate_to"]
            model["source"] = f"path:{wide_target(model['source'], WIDE)}"
    if is_dry:
        config["engine"] |= {"max_requests": 4, "max_model_len": 256}
    return config


def wide_target(source: str, growth: Growth) -> Path:
    """Writes the inflated checkpoint into the cache."""
    folder = cache_dir() / "wide-target"
    with mock.patch.object(inflate, "InflatedTensors", _DrawnOnDevice):
        inflate.inflate(resolve_source(source, field="target"), folder, growth)
    return folder


class PassCounts:
    """Passes that ran eagerly, and graphs that were captured, since the last `taken`."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    @contextmanager
    def counted(self) -> Iterator[None]:
        with (
            mock.patch.object(GraphRunner, "_eagerly", self._counting("eager passes")),
            mock.patch.object(GraphRunner, "_capture", self._counting("captures")),
        ):
            yield

    def taken(self) -> dict[str, int]:
        found = {name: self._counts[name] for name in ("eager passes", "captures")}
        self._counts.clear()
        return found

    def _counting(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(
            GraphRunner, {"eager passes": "_eagerly", "captures": "_capture"}[name]
        )

        def run(runner: GraphRunner, *given: Any) -> Any:
            self._counts[name] += 1
            return method(runner, *given)

        return run


def models(router: ChainRouter) -> dict[str, Any]:
    """How each of them computes: attention, and whether it has graphs."""
    loaded = {name: router.pool.get(name) for name in router.pool.models}
    return {
        "models": {
            name: {
                "parameters": one.parameter_count,
                "dtype": str(one.dtype),
                "device": str(one.device),
                "attention": str(one.attention),
                "sizes of graphs": len(getattr(one.sized, "sizes", ())),
            }
            for name, one in loaded.items()
        }
    }


@dataclass(frozen=True)
class Run:
    """`counts`: of cycles, passes and captures."""

    texts: tuple[tuple[int, ...], ...]
    seconds: float
    counts: Mapping[str, float]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


class Bench:
    """Attributes: verdict: in one line, what was found so far."""

    def __init__(self, router: ChainRouter, passes: PassCounts, new_tokens: int) -> None:
        self._router, self._passes, self.new_tokens = router, passes, new_tokens
        self._prompts = tokenize(BUILT_IN, router.tokenizer, 256)
        small, middle, target = (model.name for model in router.pool.config.models)

        def fixed(drafter: str, depth: int, width: int = 1) -> dict[str, Any]:
            chain = (drafter, target)
            return {"policy": "static", "chain": chain, "depth": depth, "width": width}

        self.arrangements: dict[str, dict[str, Any]] = {
            "off": {"policy": "target-only"},
            f"{small}, depth 5": fixed(small, 5),
            f"{middle}, depth 5": fixed(middle, 5),
            f"{middle}, depth 3": fixed(middle, 3),
            f"{small}, 4 deep, 3 wide": fixed(small, 4, 3),
            "adaptive": {"policy": "adaptive"},
        }
        self.verdict = ""

    def works(self, temperature: float, batch: int, number: int) -> list[Work]:
        return deal(self._prompts, number, batch, self.new_tokens, temperature)

    def run(self, temperature: float, batch: int) -> dict[str, Any]:
        """All arrangements in turn, round after round; a round is left out of the figures."""
        found: dict[str, list[list[Run]]] = {name: [] for name in self.arrangements}
        first: dict[str, list[Run]] = {}
        for number in range(-1, ROUNDS):
            for name in found:
                works = self.works(temperature, batch, number % ROUNDS)
                runs = [self.decode(name, work) for work in works]
                if number < 0:
                    first[name] = runs
                else:
                    found[name].append(runs)
        table = {name: self._row(found, name) for name in found}
        for name, runs in first.items():
            table[name]["first round"] = summed(runs)
        key = f"temperature {temperature:g}, {batch} together"
        self._tell(key, table)
        return {key: table}

    def decode(self, name: str, work: Work) -> Run:
        """Serves the work's prompts together. Raises `RuntimeError` where a request fails."""
        params = [
            SamplingParams(
                max_new_tokens=work.new_tokens, temperature=work.temperature, seed=seed,
                ignore_eos=True, prefix_cache=False,
            )
            for seed in work.seeds
        ]  # fmt: skip
        router, instruments = self._router, self._router.instruments
        router.set_policy(**self.arrangements[name])
        instruments.set_learning(name == "adaptive")
        self._passes.taken()
        before, started = totals(instruments.statistics()), time.perf_counter()
        override = "off" if name == "off" else None
        outputs = router.generate(
            [prompt.token_ids for prompt in work.prompts],
            params,
            override,  # type: ignore[arg-type]
        )
        seconds = time.perf_counter() - started
        if failed := next((one.error for one in outputs if one.error is not None), None):
            raise RuntimeError(f"{name}: {failed}")
        after = totals(instruments.statistics())
        spent = {name: value - before[name] for name, value in after.items()}
        counts = {**spent, **self._passes.taken()}
        return Run(tuple(tuple(one.token_ids) for one in outputs), seconds, counts)

    def _row(self, found: Mapping[str, Sequence[Sequence[Run]]], name: str) -> dict[str, Any]:
        """Tokens/s of all counted rounds, and the median over rounds of the ratio to `off`."""
        pairs = list(zip(found[name], found["off"], strict=True))
        ratios = [seconds_of(off) / seconds_of(own) for own, off in pairs]
        equal = all([r.texts for r in own] == [r.texts for r in off] for own, off in pairs)
        runs = [run for own in found[name] for run in own]
        return {**summed(runs), "ratio": round(statistics.median(ratios), 3), "equal": equal}

    def _tell(self, key: str, table: Mapping[str, Mapping[str, Any]]) -> None:
        """The table to the log, and the verdict."""
        for name, row in table.items():
            print(f"{key}: {name}: {json.dumps(row)}", flush=True)
        ratios = {name: row["ratio"] for name, row in table.items()}
        adaptive = ratios.pop("adaptive")
        del ratios["off"]
        best = max(ratios, key=lambda name: ratios[name])
        equal = "equal" if all(row["equal"] for row in table.values()) else "TOKENS DIFFER"
        self.verdict += (
            f" [{key}: off {table['off']['tokens/s']}/s, {best} {ratios[best]},"
            f" adaptive {adaptive}, {equal}]"
        )


def totals(engine: EngineStatistics) -> dict[str, float]:
    return {
        "cycles": engine.cycles, "cycle ms": engine.cycle_ms, "control ms": engine.control_ms,
        "model ms": sum(engine.model_ms.values()), "logits ms": engine.logits_ms,
        "forwards": sum(engine.forwards.values()), "switches": engine.switches,
        "shadow evaluations": engine.shadow_evaluations,
    }  # fmt: skip


def seconds_of(runs: Sequence[Run]) -> float:
    return sum(run.seconds for run in runs)


def summed(runs: Sequence[Run]) -> dict[str, Any]:
    tokens, counts = sum(run.tokens for run in runs), defaultdict[str, float](float)
    for run in runs:
        for name, value in run.counts.items():
            counts[name] += value
    cycles = max(1.0, counts["cycles"])
    return {
        "tokens/s": round(tokens / seconds_of(runs), 1),
        "tokens": tokens,
        "tokens a cycle": round(tokens / cycles, 2),
        "ms a cycle": round(counts["cycle ms"] / cycles, 3),
        **{name: round(value, 1) for name, value in counts.items()},
    }


def idle_shares(bench: Bench, batches: Sequence[int]) -> dict[str, Any]:
    """By arrangement and number of requests: how long the device idles, and its kernels."""
    found: dict[str, Any] = {}
    names = [name for name in bench.arrangements if "depth 3" not in name]
    for batch in batches:
        for name in names[:3]:  # the target alone, and each drafter in a chain
            work = bench.works(0.0, batch, 0)[0]
            bench.decode(name, work)
            plain = bench.decode(name, work)
            key = f"{name}, {batch} together"
            try:
                found[key] = device_use(partial(bench.decode, name, work), plain)
            except (ValueError, KeyError, RuntimeError) as error:  # the rest is worth having
                found[key] = {"idle share": float("nan"), "failed": repr(error)[:300]}
            print(f"idle: {key}: {json.dumps(found[key])}", flush=True)
    shares = ", ".join(f"{key}: {one['idle share']:.0%}" for key, one in found.items())
    bench.verdict += f" [idle {shares}]"
    return {"idle": found, "verdict": bench.verdict}


def device_use(decode: Callable[[], Run], plain: Run) -> dict[str, Any]:
    """`plain`: the same run without the profiler, whose wall time counts."""
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CUDA if ON_GPU else activity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        profiled = decode()
        if ON_GPU:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    kernels = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    busy_ms, gaps = busy_and_gaps([(one["ts"], one["ts"] + one["dur"]) for one in kernels])
    by_name = defaultdict[str, list[float]](list)
    for one in kernels:
        by_name[one["name"][:80]].append(one["dur"])
    cycles = max(1, int(plain.counts["cycles"]))
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:12]
    long = [gap for gap in gaps if gap > 0.02]
    return {
        "idle share": round(1 - busy_ms / (1e3 * plain.seconds), 4),
        "ms a cycle": round(1e3 * plain.seconds / cycles, 3),
        "profiled ms a cycle": round(1e3 * profiled.seconds / cycles, 3),
        "busy ms a cycle": round(busy_ms / cycles, 3),
        "kernels a cycle": round(len(kernels) / cycles, 1),
        "copies a cycle": round(sum("mem" in one["cat"] for one in kernels) / cycles, 1),
        "gaps above 20 us a cycle": round(len(long) / cycles, 2),
        "their ms a cycle": round(sum(long) / cycles, 3),
        "tokens a cycle": round(plain.tokens / cycles, 2),
        "top": {
            name: {"ms a cycle": round(sum(us) / 1e3 / cycles, 4), "a cycle": len(us) / cycles}
            for name, us in top
        },
    }


def busy_and_gaps(spans: Sequence[tuple[float, float]]) -> tuple[float, list[float]]:
    """Of spans in microseconds that may overlap: the time that one of them covers, and the gaps
    between, in milliseconds."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    busy = sum(end - begin for begin, end in joined)
    return busy / 1e3, [(after[0] - before[1]) / 1e3 for before, after in pairwise(joined)]
