"""One short loan of a GPU: every check in turn, each with a time limit, results kept after each.

    python -m checks.gpu.lease OUT_DIR [--dry] [--stages rows,chains] [--limit SECONDS]

Writes `results.json` and `log.txt` into OUT_DIR, and a line for each stage to standard output.
A stage is a process group of its own, which is killed at its limit; what it had written stays.
`--dry`: on a CPU, with tiny shapes and models that are not inflated, to see that all of it runs.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 570  # of all stages
CACHE_BYTES = 20 * 2**30  # that inflated models may take
GPU_TESTS = (
    "checks/gpu", "tests/specrouter/test_gpu.py", "tests/modelpool/fast/test_pack_sender.py",
)  # fmt: skip
KERNEL_TESTS = (  # as of `make gpu`
    "tests/modelpool/attention", "tests/modelpool/fast/test_cuda_forward.py",
    "tests/processors/test_choice_kernels.py", "tests/processors/test_fused_sampler.py",
)  # fmt: skip


class Results:
    """One stage's part of the file; one process writes at a time."""

    def __init__(self, out: Path, stage: str, is_dry: bool) -> None:
        self.file, self.stage, self.is_dry = out / "results.json", stage, is_dry

    @property
    def own(self) -> dict[str, Any]:
        found: dict[str, Any] = self._read().get(self.stage, {})
        return found

    def put(self, values: Mapping[str, Any]) -> None:
        found = self._read()
        own = found.setdefault(self.stage, {})
        for name, value in values.items():  # a mapping goes on with what is there
            is_more = isinstance(value, dict) and isinstance(own.get(name), dict)
            own[name] = {**own[name], **value} if is_more else value
        unfinished = self.file.with_suffix(".part")
        unfinished.write_text(json.dumps(found, indent=1) + "\n")
        unfinished.replace(self.file)

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        return found


def ceilings(results: Results) -> None:
    """What the device can: a copy, a product of one row, a large product."""
    import torch
    from torch.nn import functional as F

    from checks.gpu.measure import DEVICE, DTYPE, ON_GPU, copies, graph_ms

    size = 2**31 if ON_GPU else 2**20
    name = torch.cuda.get_device_name() if ON_GPU else "cpu"
    results.put({"device": name, "torch": torch.__version__, "python": sys.version.split()[0]})
    one, other = (torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    copied = 2 * size / graph_ms(lambda: other.copy_(one), 5) / 1e6
    results.put({"copy GB/s": round(copied)})
    outputs, inputs = (37888, 3584) if ON_GPU else (256, 128)
    weight = copies(outputs, inputs)[0]
    x = torch.randn(128, inputs, device=DEVICE, dtype=DTYPE)
    for rows in (1, 16, 128):
        ms = graph_ms(lambda: F.linear(x[:rows], weight), 5)  # noqa: B023
        results.put({f"product of {rows} rows GB/s": round(weight.nbytes / ms / 1e6)})
    side = 8192 if ON_GPU else 64
    square = torch.randn(side, side, device=DEVICE, dtype=DTYPE)
    tflops = 2 * side**3 / graph_ms(lambda: square @ square, 5) / 1e9
    read = results.own["product of 1 rows GB/s"]
    verdict = f"{name}: copy {copied:.0f} GB/s, 1 row {read} GB/s, {tflops:.0f} TFLOP/s"
    results.put({"large product TFLOP/s": round(tflops), "verdict": verdict})


def tests(results: Results) -> None:
    """Tests on a GPU, and the kernels' own; counted as they end."""
    chosen = GPU_TESTS if results.is_dry else (*GPU_TESTS, *KERNEL_TESTS)
    parallel = ["-n", "2" if results.is_dry else "8", "--dist=worksteal"]
    command = [
        *(sys.executable, "-m", "pytest", "-v", "--tb=short", "-ra", "-p", "no:cacheprovider"),
        *(parallel if find_spec("xdist") else []), *chosen,
    ]  # fmt: skip
    counts, bad = dict.fromkeys(("PASSED", "FAILED", "ERROR", "SKIPPED"), 0), list[str]()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            found = re.match(r"(?:\[gw\d+\] \[ *\d+%\] (\w+) (.*)|(\S+) (\w+) +\[ *\d+%\])", line)
            if not found:
                continue
            word, name = found[1] or found[4], found[2] or found[3]
            counts[word] = counts.get(word, 0) + 1
            bad += [name] if word in ("FAILED", "ERROR") else []
            text = ", ".join(f"{number} {word.lower()}" for word, number in counts.items())
            results.put({"counts": counts, "failed": bad, "verdict": text})
    if process.returncode:
        text = f"{results.own.get('verdict', 'no test')}; pytest ended with {process.returncode}"
        results.put({"verdict": text})


def rows(results: Results) -> None:
    """Bits and times of products by the number of rows."""
    import torch

    from checks.gpu import measure

    counts = (1, 16, 128) if results.is_dry else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    shapes = measure.TINY if results.is_dry else {"Qwen2.5-7B": measure.SHAPES["Qwen2.5-7B"]}
    with torch.inference_mode():
        found = measure.gemm(shapes, counts)
    print(json.dumps(found), flush=True)
    parts = [f"{row['part']}: bits of 128 at {row['as many']}, ms {row['ms']}" for row in found]
    results.put({"products": found, "verdict": "; ".join(parts)})


def forward(results: Results) -> None:
    """One pass of random models, eagerly and as a graph."""
    import torch

    from checks.gpu import measure

    with torch.inference_mode():
        for name, shape in (measure.TINY if results.is_dry else measure.SHAPES).items():
            found = measure.forward({name: shape}, (1, 4, 16, 64, 128, 256))
            print(json.dumps(found), flush=True)
            results.put({name: found})
            kind = "graph ms" if "graph ms" in found[0] else "eager ms"
            text = ", ".join(f"{row['tokens']}: {row[kind]}" for row in found)
            results.put({"verdict": f"{results.own.get('verdict', '')} {name} {kind} {text};"})


def chains(results: Results) -> None:
    """Tokens/s of fixed chains and of `adaptive`, and the idle share; larger batches last."""
    _serve(results, with_chains=True)


def idle(results: Results) -> None:
    """The idle share alone."""
    _serve(results, with_chains=False)


def _serve(results: Results, with_chains: bool) -> None:
    from checks.gpu import served
    from specrouter.router import ChainRouter

    is_dry, started = results.is_dry, time.perf_counter()
    config = served.bench_config(is_dry)
    results.put({"inflating s": round(time.perf_counter() - started, 1)})
    passes, started = served.PassCounts(), time.perf_counter()
    with passes.counted(), ChainRouter.from_config(config) as router:
        loading = round(time.perf_counter() - started, 1)
        results.put({"loading s": loading, "loading": passes.taken(), **served.models(router)})
        print(f"loaded: {json.dumps(results.own)}", flush=True)
        bench = served.Bench(router, passes, new_tokens=8 if is_dry else 96)
        few, many = ((1, 2), 3) if is_dry else ((1, 4, 16), 32)
        ends = (few[0], few[-1])
        first = [(0.0, batch) for batch in few] + [(1.0, batch) for batch in ends]

        def run(temperature: float, batch: int) -> None:
            try:
                results.put(bench.run(temperature, batch))
            except RuntimeError as error:  # of a request: the other runs are worth having
                bench.verdict += f" [{batch} together, temperature {temperature}: {error!r}]"
            results.put({"verdict": bench.verdict})

        for temperature, batch in first if with_chains else ():
            run(temperature, batch)
        results.put(served.idle_shares(bench, ends))
        for temperature in (0.0, 1.0) if with_chains else ():
            run(temperature, many)
        router.instruments.check_integrity()


@dataclass(frozen=True)
class Stage:
    run: Callable[[Results], None]
    limit_s: int


STAGES = {
    "ceilings": Stage(ceilings, 25),
    "tests": Stage(tests, 110),
    "rows": Stage(rows, 80),
    "forward": Stage(forward, 60),
    "chains": Stage(chains, 300),
    "idle": Stage(idle, 120),  # is part of `chains`, and left out unless it is asked for
}
DEFAULT = tuple(name for name in STAGES if name != "idle")


def run_stage(name: str, out: Path, left_s: float, options: Sequence[str], cache: str) -> None:
    """As a process group; tells how it ended."""
    environment = {
        **os.environ, "SPECROUTER_CACHE": cache, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
        "TEARDOWN_CUPTI": "0",  # or the profiler may crash where CUDA graphs are replayed
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    is_dry = "--dry" in options
    if is_dry:
        environment["TRITON_INTERPRET"] = "1"
    limit_s, started = min(STAGES[name].limit_s * (4 if is_dry else 1), left_s), time.monotonic()
    with (out / "log.txt").open("a") as log:
        log.write(f"\n===== {name}, at most {limit_s:.0f} s =====\n")
        log.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "checks.gpu.lease", str(out), "--inside", name, *options],
            cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            ended = f"exit {process.wait(timeout=limit_s)}"
        except subprocess.TimeoutExpired:
            ended = "killed at its limit"
        finally:
            _kill_group(process)
    results = Results(out, name, is_dry)
    seconds = round(time.monotonic() - started, 1)
    results.put({"ended": ended, "seconds": seconds})
    verdict = results.own.get("verdict", "no result: see log.txt")
    print(f"{name}: {ended}, {seconds} s: {verdict}", flush=True)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started; it is the group's leader."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def roomy_folder() -> str | None:
    """Where inflated models fit, in memory if possible; None: the default."""
    memory = Path("/dev/shm")
    is_roomy = memory.is_dir() and shutil.disk_usage(memory).free > CACHE_BYTES
    return str(memory) if is_roomy else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m checks.gpu.lease")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--stages", default=",".join(DEFAULT), help=", ".join(STAGES))
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of all stages")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        STAGES[given.inside].run(Results(given.out, given.inside, given.dry))
        return
    chosen, started = given.stages.split(","), time.monotonic()
    if unknown := set(chosen) - STAGES.keys():
        parser.error(f"no stages: {', '.join(sorted(unknown))}")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=roomy_folder()) as cache:
        for name in chosen:
            left_s = given.limit * (10 if given.dry else 1) - (time.monotonic() - started)
            if left_s < 10:
                print(f"{name}: no time left", flush=True)
                continue
            run_stage(name, given.out, left_s, ["--dry"] if given.dry else [], cache)


if __name__ == "__main__":
    main()
