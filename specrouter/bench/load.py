"""`specrouter bench load`: how many requests get their tokens in time, policy by policy.

The same requests arrive at the same times under every policy, whatever the state of the service;
policies take turns, in an order that rotates by round. Objectives are the trace's ratios times the
baseline latency, which is measured first: that of a request alone, on the target only.

Contract: a bad argument raises `ConfigError` before anything is loaded. Attainment is judged here,
by the times that a request got, not by what the service says of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from modelpool import ModelPool
from modelpool.errors import ConfigError
from specrouter.bench.api_key import SERVICE_VARIABLE, read_api_key
from specrouter.bench.conditions import conditions, cpu_name, request_limit
from specrouter.bench.load_bench import LoadBench
from specrouter.bench.load_options import LoadOptions
from specrouter.bench.load_plot import PLOTS, plot_path, write_load_plots
from specrouter.bench.load_points import read_arrivals, sweep
from specrouter.bench.load_prompts import load_labelled
from specrouter.bench.load_report import load_table
from specrouter.bench.load_services import OwnService, ServerService
from specrouter.bench.output_file import write_outputs, writing
from specrouter.bench.plot import check_plot
from specrouter.bench.progress import Progress, ShownLoad
from specrouter.bench.prompts import Texts
from specrouter.config import RouterConfig, TreesConfig
from specrouter.router import ChainRouter
from specrouter.sim.machine import Machine, load_machine
from specrouter.sim.service import SimulatedService
from specrouter.sim.traces import Arrival

_MOST_ROWS = 1024
_LONGEST_SIMULATED = 1 << 20  # tokens of a request; a simulated machine has no limit of its own


def bench_load(options: LoadOptions, progress: Progress) -> dict[str, Any]:
    """Measures, and returns the JSON document. Raises `ConfigError`, `MeasurementError`."""
    texts = load_labelled(options.prompts)
    if options.plot is not None:
        for name in (None, *PLOTS):
            check_plot(plot_path(options.plot, name))
    trace = read_arrivals(options)
    if options.server is not None:
        return _measure_server(options.server, options, trace, texts, progress)
    if options.machine is not None:
        return _measure_machine(options, trace, texts, progress)
    assert options.config is not None, "the options have one of both"
    config = _with_rows(RouterConfig.load(options.config), options.rows)
    if options.fresh_times:
        config = config.with_fresh_times()
    loading = ShownLoad(progress)
    pool = ModelPool.from_config(config.pool, progress=loading)  # reads no weights
    points = sweep(trace, options, request_limit(config, pool))

    def tokenize(text: str) -> Sequence[int]:
        ids: Sequence[int] = pool.tokenizer(text)["input_ids"]
        return ids

    progress.note(f"loading {pool.target}")
    with ChainRouter.from_config(config, loading) as router:
        bench = LoadBench(OwnService(router), tokenize, texts, options, progress)
        if options.simulate is not None:
            bench.settle(points[0])
            machine = simulated_machine(router)
            service = SimulatedService(machine, options.simulate, config.trees)
            bench = LoadBench(service, tokenize, texts, options, progress, service)
        measured = bench.run(points)
        rows = {"rows": config.engine.max_requests}
        return {"conditions": {**conditions(router), **rows, **_asked(options, bench)}, **measured}


def simulated_machine(router: ChainRouter) -> Machine:
    """The router's measured times of the target and its smallest drafter, and of its own work
    around their forwards, on the machine as it is: what it has served so far has taught it both.
    Raises `ConfigError`."""
    pool, known = router.pool, router.performance()
    drafters = [n for n in pool.names if n in known.times and n != pool.target]
    with_weights = [name for name in drafters if not pool.is_weightless(name)]
    if not with_weights:
        raise ConfigError("--simulate", "the pool has no drafter with weights that is loaded")
    names, engine = (with_weights[0], pool.target), router.config.engine
    return Machine(
        pool.target,
        {name: known.times[name].scaled(known.machine) for name in names},
        {name: known.parameters[name] for name in names},
        engine.prefill_chunk,
        engine.max_requests,
        engine.kv_budget_tokens,
        stages={name: curve.scaled(known.machine) for name, curve in known.stages.items()},
    )


def _measure_machine(
    options: LoadOptions, trace: Sequence[Arrival], texts: Texts, progress: Progress
) -> dict[str, Any]:
    """No model is loaded: a prompt's tokens are its bytes."""
    assert options.machine is not None, "the caller has seen it"
    assert options.simulate is not None, "the options were checked"
    machine = load_machine(options.machine)
    if options.rows is not None:
        machine = replace(machine, max_requests=options.rows)
    service = SimulatedService(machine, options.simulate, TreesConfig())
    bench = LoadBench(
        service, lambda text: list(text.encode()), texts, options, progress, service
    )  # fmt: skip
    measured = bench.run(sweep(trace, options, _LONGEST_SIMULATED))
    elsewhere = {
        "machine": options.machine.name,
        "target": machine.target,
        "rows": machine.max_requests,
        "cpu": "simulated",
    }
    return {"conditions": {**elsewhere, **_asked(options, bench)}, **measured}


def _measure_server(
    url: str,
    options: LoadOptions,
    trace: Sequence[Arrival],
    texts: Texts,
    progress: Progress,
) -> dict[str, Any]:
    """Nothing of a model is needed here: the server says how it reads texts, and how long."""
    service = ServerService(url, read_api_key(SERVICE_VARIABLE, options.api_key))
    bench = LoadBench(service, service.tokenize, texts, options, progress)
    measured = bench.run(sweep(trace, options, service.max_request_tokens))
    elsewhere = {
        "server": url,
        "target": service.model,
        "max_request_tokens": service.max_request_tokens,
        "cpu": cpu_name(),
    }
    return {"conditions": {**elsewhere, **_asked(options, bench)}, **measured}


def write_load(document: Mapping[str, Any], options: LoadOptions) -> None:
    """The table, and the files that are asked for. Raises `FileNotWrittenError`."""

    def plot(path: Path) -> list[Path]:
        with writing(path):
            return write_load_plots(document, path)

    drawn = None if options.plot is None else partial(plot, options.plot)
    write_outputs(document, load_table(document), options.json, drawn)


def _with_rows(config: RouterConfig, rows: int | None) -> RouterConfig:
    if rows is None:
        return config
    if rows > _MOST_ROWS:
        raise ConfigError("--rows", f"must be at most {_MOST_ROWS}, not {rows}")
    engine = config.engine.model_copy(update={"max_requests": rows})
    return config.model_copy(update={"engine": engine})


def _asked(options: LoadOptions, bench: LoadBench) -> dict[str, Any]:
    return {
        "config": None if options.config is None else options.config.name,
        "trace": None if options.trace is None else options.trace.name,
        "poisson_per_s": options.poisson,
        "lengths": options.lengths,
        "e2e_objective_ms": options.e2e_ms,
        "ttft_slowdown": options.ttft_slowdown,
        "requests": options.requests,
        "skip": options.skip,
        "output_tokens": options.output_tokens,
        "length_scale": options.length_scale,
        "trace_baseline_ms": options.trace_baseline_ms,
        "prompts": [Path(file).name for file in options.prompts],
        "rounds": options.rounds,
        "simulated_acceptance": options.simulate,
        "temperature": options.temperature,
        "seed": options.seed,
        "baseline_ms": bench.alone and bench.alone.tpot_ms,
        "policies": list(options.policies),
    }
