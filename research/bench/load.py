"""`python -m research load`: how many requests get their tokens in time, policy by policy.

The same requests arrive at the same times under every policy, whatever the state of the service.

Contract: a bad argument raises `ConfigError` before anything is loaded. Attainment is decided
here, by the times that a request got, not by what the service says of it.
"""

from pathlib import Path
from typing import Any

from modelpool import ModelPool
from modelpool.errors import ConfigError
from research.bench.load_bench import LoadBench
from research.bench.load_requests import load_labelled, read_arrivals, sweep
from research.bench.options import LoadOptions
from research.bench.policy_service import PolicyService
from specrouter.bench.conditions import conditions, request_limit
from specrouter.config import RouterConfig
from specrouter.progress import Progress, ShownLoad
from specrouter.router import ChainRouter

_MOST_ROWS = 1024


def bench_load(options: LoadOptions, progress: Progress) -> dict[str, Any]:
    """Measures, and returns the JSON document. Raises `ConfigError`, `MeasurementError`."""
    texts = load_labelled(options.prompts)
    trace = read_arrivals(options)
    assert options.config is not None, "a live run has one"
    config = with_rows(RouterConfig.load(options.config), options.rows)
    if options.fresh_times:
        config = config.with_fresh_times()
    loading = ShownLoad(progress)
    pool = ModelPool.from_config(config.pool, progress=loading)  # reads no weights
    points = sweep(trace, options, request_limit(config, pool))
    progress.note(f"loading {pool.target}")
    with ChainRouter.from_config(config, loading) as router:
        service = PolicyService(router)
        bench = LoadBench(
            service, lambda text: pool.tokenizer(text)["input_ids"], texts, options, progress
        )
        measured = bench.run(points)
        rows = {"rows": config.engine.max_requests}
        return {"conditions": {**conditions(router), **rows, **asked(options, bench)}, **measured}


def with_rows(config: RouterConfig, rows: int | None) -> RouterConfig:
    if rows is None:
        return config
    if rows > _MOST_ROWS:
        raise ConfigError("--rows", f"must be at most {_MOST_ROWS}, not {rows}")
    engine = config.engine.model_copy(update={"max_requests": rows})
    return config.model_copy(update={"engine": engine})


def asked(options: LoadOptions, bench: LoadBench) -> dict[str, Any]:
    return {
        "config": None if options.config is None else options.config.name,
        "trace": None if options.trace is None else options.trace.name,
        "poisson_per_s": options.poisson,
        "e2e_objective_ms": options.e2e_ms,
        "ttft_slowdown": options.ttft_slowdown,
        "requests": options.requests,
        "skip": options.skip,
        "output_tokens": options.output_tokens,
        "length_scale": options.length_scale,
        "trace_baseline_ms": options.trace_baseline_ms,
        "prompts": [Path(file).name for file in options.prompts],
        "rounds": options.rounds,
        "temperature": options.temperature,
        "seed": options.seed,
        "baseline_ms": bench.alone and bench.alone.tpot_ms,
        "policies": list(options.policies),
    }
