"""`python -m research simulate`: `bench load` in simulated time, where nothing else runs.

The machine is a file like those of `research/machines`, or this one: a pool's measured times. What
is written is what `specrouter bench load` writes, policies that no engine runs included.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from modelpool.errors import ConfigError
from research.bench.load import asked, with_rows
from research.bench.load_bench import LoadBench
from research.bench.load_requests import load_labelled, read_arrivals, sweep
from research.bench.options import LoadOptions
from research.bench.policy_service import PolicyService
from research.bench.traces import Arrival
from research.named_policies import POLICIES
from research.sim.machine import Machine, load_machine
from research.sim.service import SimulatedService
from research.sim.text import LEAST, MOST
from specrouter.bench.conditions import conditions, request_limit
from specrouter.bench.prompts import Texts
from specrouter.config import RouterConfig, TreesConfig
from specrouter.progress import Progress
from specrouter.router import ChainRouter

_LONGEST = 1 << 20  # tokens of a request; a simulated machine has no limit of its own


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(LoadOptions):
    """
    Attributes:
        acceptance: how often a drafter's best token is accepted.
        machine: whose times are taken; None takes the measured ones of a pool.
    """

    is_simulated: ClassVar[bool] = True
    known_policies: ClassVar[Collection[str]] = POLICIES

    acceptance: float = 0.75
    machine: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.machine is not None and self.config is not None:
            raise ConfigError("--machine", "not with --config")
        if not LEAST <= self.acceptance <= MOST:  # NaN is not
            reason = f"must be from {LEAST} to {MOST}, not {self.acceptance}"
            raise ConfigError("--acceptance", reason)


def simulate(options: SimulateOptions, progress: Progress) -> dict[str, Any]:
    """Returns the JSON document. Raises `ConfigError`, `MeasurementError`."""
    texts, trace = load_labelled(options.prompts), read_arrivals(options)
    if options.machine is not None:
        found = _on_machine(options, options.machine, trace, texts, progress)
    else:
        assert options.config is not None, "the options have one of both"
        found = _on_pool(options, options.config, trace, texts, progress)
    found["conditions"]["simulated_acceptance"] = options.acceptance
    return found


def _on_pool(
    options: SimulateOptions, file: Path, trace: Sequence[Arrival], texts: Texts, progress: Progress
) -> dict[str, Any]:
    """Its models are timed first."""
    config = with_rows(RouterConfig.load(file), options.rows)
    if options.fresh_times:
        config = config.with_fresh_times()
    with ChainRouter.from_config(config) as router:
        pool = router.pool

        def tokenize(text: str) -> Sequence[int]:
            ids: Sequence[int] = pool.tokenizer(text)["input_ids"]
            return ids

        points = sweep(trace, options, request_limit(config, pool))
        LoadBench(PolicyService(router), tokenize, texts, options, progress).settle(points[0])
        service = SimulatedService(
            machine=simulated_machine(router), acceptance=options.acceptance, trees=config.trees
        )
        bench = LoadBench(service, tokenize, texts, options, progress, service)
        measured = bench.run(points)
        rows = {"rows": config.engine.max_requests}
        return {"conditions": {**conditions(router), **rows, **asked(options, bench)}, **measured}


def simulated_machine(router: ChainRouter) -> Machine:
    """The router's measured times of the target and its smallest drafter, and of its own work
    around their forwards, on the machine as it is: what it has served so far has taught it both.
    Raises `ConfigError`."""
    pool, known = router.pool, router.instruments.performance()
    drafters = [n for n in pool.names if n in known.times and n != pool.target]
    with_weights = [name for name in drafters if name in pool.models]
    if not with_weights:
        raise ConfigError("--config", "the pool has no drafter with weights that is loaded")
    names, engine = (with_weights[0], pool.target), router.config.engine
    return Machine(
        target=pool.target,
        times={name: known.times[name].scaled(known.machine) for name in names},
        parameters={name: known.parameters[name] for name in names},
        prefill_chunk=engine.prefill_chunk,
        max_requests=engine.max_requests,
        kv_tokens=engine.kv_budget_tokens,
        stages={name: curve.scaled(known.machine) for name, curve in known.stages.items()},
    )


def _on_machine(
    options: SimulateOptions, file: Path, trace: Sequence[Arrival], texts: Texts, progress: Progress
) -> dict[str, Any]:
    """No model is loaded: a prompt's tokens are its bytes."""
    machine = load_machine(file)
    if options.rows is not None:
        machine = replace(machine, max_requests=options.rows)
    service = SimulatedService(machine=machine, acceptance=options.acceptance, trees=TreesConfig())
    bench = LoadBench(
        service, lambda text: list(text.encode()), texts, options, progress, service
    )  # fmt: skip
    measured = bench.run(sweep(trace, options, _LONGEST))
    elsewhere = {
        "machine": file.name,
        "target": machine.target,
        "rows": machine.max_requests,
        "cpu": "simulated",
    }
    return {"conditions": {**elsewhere, **asked(options, bench)}, **measured}
