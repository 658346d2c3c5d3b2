"""`specrouter bench load`: how many requests get their tokens in time, policy by policy.

The same requests arrive at the same times under every policy, whatever the state of the service;
policies take turns, in an order that rotates by round. Objectives are the trace's ratios times the
baseline latency, which is measured first: that of a request alone, on the target only.

Contract: a bad argument raises `ConfigError` before anything is loaded. Attainment is judged here,
by the times that a request got, not by what the service says of it.
"""

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from modelpool import ModelPool
from modelpool.errors import ConfigError
from specrouter.bench.api_key import SERVICE_VARIABLE, read_api_key
from specrouter.bench.conditions import conditions, cpu_name, request_limit
from specrouter.bench.load_figures import figures, medians, series, with_ratios
from specrouter.bench.load_options import LoadOptions
from specrouter.bench.load_plot import PLOTS, plot_path, write_load_plots
from specrouter.bench.load_prompts import fill_prompts, load_labelled
from specrouter.bench.load_report import describe, load_table
from specrouter.bench.load_services import OwnService, ServerService
from specrouter.bench.output_file import writing
from specrouter.bench.plot import check_plot
from specrouter.bench.prompts import Texts, Tokenize
from specrouter.bench.rounds import Progress
from specrouter.bench.sample import MeasurementError
from specrouter.config import RouterConfig
from specrouter.router import ChainRouter
from specrouter.sim import traces
from specrouter.sim.replay import Clock, LoadRequest, Outcome, Service, replay
from specrouter.sim.service import Machine, SimulatedService
from specrouter.sim.text import SimulatedText
from specrouter.sim.traces import Arrival
from specrouter.slo.policies import BASELINES

_BASELINE_RUNS = 5
_BASELINE_TOKENS = 32
_SETTLING_REQUESTS = 10
_WARM_UP_REQUESTS = 4
_WARM_UP_TOKENS = 16
_NOTE_S = 10.0  # between two lines that stay, about a run
_SEEDS_OF_A_ROUND = 100_000
_MOST_ROWS = 1024


class PolicyService(Service, Protocol):
    def use(self, policy: str) -> None: ...


class WallClock:
    def now_s(self) -> float:
        return time.perf_counter()

    def sleep_s(self, duration_s: float) -> None:
        time.sleep(duration_s)


@dataclass(frozen=True)
class Point:
    """One of the sweep. `arrivals` are the requests that all its policies get."""

    scale: float
    urgent_share: float
    slo_scale: float
    arrivals: tuple[Arrival, ...]

    def to_json(self) -> dict[str, Any]:
        rate = traces.rate_per_s(self.arrivals)
        return {
            "scale": self.scale,
            "requests_per_s": rate if rate < float("inf") else None,
            "urgent_share": self.urgent_share,
            "slo_scale": self.slo_scale,
        }


def bench_load(options: LoadOptions, progress: Progress) -> dict[str, Any]:
    """Measures, and returns the JSON document. Raises `ConfigError`, `MeasurementError`."""
    texts = load_labelled(options.prompts)
    if options.plot is not None:
        for name in PLOTS:
            check_plot(plot_path(options.plot, name))
    trace = read_arrivals(options)
    if options.server is not None:
        return _measure_server(options.server, options, trace, texts, progress)
    assert options.config is not None, "the options have one of both"
    config = _with_rows(RouterConfig.load(options.config), options.rows)
    pool = ModelPool.from_config(config.pool)  # reads no weights
    points = sweep(trace, options, request_limit(config, pool))
    progress.note(f"loading {pool.target}")
    with ChainRouter.from_config(config) as router:
        simulated = None if options.simulate is None else _simulated(router, options.simulate)
        bench = LoadBench(
            simulated or OwnService(router),
            lambda text: pool.tokenizer(text)["input_ids"],
            texts,
            options,
            progress,
            simulated,
        )
        measured = bench.run(points)
        rows = {"rows": config.engine.max_requests}
        return {"conditions": {**conditions(router), **rows, **_asked(options, bench)}, **measured}


def _simulated(router: ChainRouter, acceptance: float) -> SimulatedService:
    """With the router's measured times of the target and its smallest drafter."""
    pool, known = router.pool, router.performance()
    drafters = [n for n in pool.names if n in known.times and n != pool.target]
    with_weights = [name for name in drafters if not pool.is_weightless(name)]
    if not with_weights:
        raise ConfigError("--simulate", "the pool has no drafter with weights that is loaded")
    names = (with_weights[0], pool.target)
    machine = Machine(
        *names,
        {name: known.times[name] for name in names},
        {name: known.parameters[name] for name in names},
        router.config.engine.prefill_chunk,
        router.config.engine.max_requests,
    )
    return SimulatedService(machine, SimulatedText(acceptance), router.config.trees)


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
    """The table, the document as the last line of stdout, and the files that are asked for.

    The series of single requests is in the file only. Raises `FileNotWrittenError`.
    """
    try:
        print(load_table(document))
        print(json.dumps({k: v for k, v in document.items() if k != "series"}), flush=True)
    finally:  # also where nobody reads stdout to its end
        if options.json is not None:
            with writing(options.json):
                options.json.write_text(json.dumps(document) + "\n", encoding="utf-8")
        if options.plot is not None:
            with writing(options.plot):
                write_load_plots(document, options.plot)


def read_arrivals(options: LoadOptions) -> list[Arrival]:
    """The requests that are asked for, before any rescaling."""
    if options.poisson is not None:
        return traces.poisson(
            options.poisson, options.requests, options.trace_baseline_ms, options.seed
        )
    assert options.trace is not None, "the options have one of both"
    found = traces.read_trace(options.trace, options.trace_baseline_ms)
    return traces.excerpt(found, options.skip, options.requests)


def sweep(trace: Sequence[Arrival], options: LoadOptions, limit: int) -> list[Point]:
    """A point for each combination of what has several values.

    Args:
        limit: tokens of a request.
    """
    if options.output_tokens is not None and options.output_tokens >= limit:
        raise ConfigError("--output-tokens", f"must be below the model's length of {limit}")
    resized = traces.resized(trace, options.length_scale, options.output_tokens, limit)
    shares: tuple[float | None, ...] = options.urgent_share or (None,)
    points = []
    for share, slo_scale, scale in itertools.product(shares, options.slo_scale, options.scale):
        mixed = resized
        if share is not None:
            mixed = traces.with_urgent_share(resized, share, options.seed)
        shown = traces.urgent_share(resized) if share is None else share
        arrivals = traces.with_slo_scale(traces.stretched(mixed, scale), slo_scale)
        points.append(Point(scale, shown, slo_scale, tuple(arrivals)))
    return points


class LoadBench:
    """A service, under each policy in turn."""

    def __init__(
        self,
        service: PolicyService,
        tokenize: Tokenize,
        texts: Texts,
        options: LoadOptions,
        progress: Progress,
        clock: Clock | None = None,
    ) -> None:
        self._service, self._tokenize, self._texts = service, tokenize, texts
        self._options, self._progress = options, progress
        self._clock = clock or WallClock()
        self.baseline_ms = 0.0

    def run(self, points: Sequence[Point]) -> dict[str, Any]:
        """`points` with the figures of each policy, and the `series` of the first one."""
        self._settle(points[0])
        self.baseline_ms = self.measure_baseline(points[0])
        self._progress.note(f"baseline latency {self.baseline_ms:.2f} ms a token")
        measured = [self._run_point(point) for point in points]
        shown = {name: series(rounds[0]) for name, rounds in measured[0].items()}
        results = zip(points, measured, strict=True)
        return {"points": [point_result(*pair) for pair in results], "series": shown}

    def _settle(self, point: Point) -> None:
        """Drafters are loaded, timed and tried before anything counts, at several loads."""
        names = [name for name in self._options.policies if name != "target-only"]
        is_settled = self._options.server is not None or self._options.simulate is not None
        if is_settled or not names:
            return
        requests = self._requests(point, 0)[:_SETTLING_REQUESTS]
        for name in names[-1:] * 2 + names[:1]:
            self._progress.show(f"settling: {name}")
            self._service.use(name)
            for count in (1, len(requests) // 2, len(requests)):
                together = [
                    replace(one, at_s=0.0, objective_ms=None) for one in requests[: max(1, count)]
                ]
                replay(together, self._service, self._clock)

    def measure_baseline(self, point: Point) -> float:
        """Median TPOT, in ms, of requests that run one at a time on the target only.

        Raises:
            MeasurementError: one of them failed.
        """
        if self._options.server is None:
            self._service.use("target-only")
        longest = sorted(self._requests(point, 0), key=lambda request: -request.new_tokens)
        found = []
        for request in longest[: _BASELINE_RUNS + 1]:
            tokens = min(request.new_tokens, _BASELINE_TOKENS)
            alone = replace(
                request, at_s=0.0, new_tokens=tokens, objective_ms=None, speculation="off"
            )
            answer = replay([alone], self._service, self._clock)[0].answer
            if answer.error is not None or not answer.tpot_ms:
                raise MeasurementError(f"baseline: {answer.error or 'no time per token'}")
            found.append(answer.tpot_ms)
        return median(found[1:] or found)  # the first one warms up

    def _run_point(self, point: Point) -> dict[str, list[list[Outcome]]]:
        """Outcomes by policy, a list for each round."""
        names = self._options.policies
        found: dict[str, list[list[Outcome]]] = {name: [] for name in names}
        for number in range(self._options.rounds):
            start = number % len(names)
            for name in (*names[start:], *names[:start]):
                found[name].append(self._run_policy(name, point, number))
        return found

    def _run_policy(self, name: str, point: Point, number: int) -> list[Outcome]:
        label = f"{describe(point.to_json())}, round {number + 1}: {name}"
        self._progress.show(label)
        self._service.use(name)
        requests = self._requests(point, number)
        self._warm_up(requests)
        every_s = _NOTE_S if self._options.simulate is None else math.inf  # simulated ones fly by
        watch = _Ticker(label, len(requests), self._progress, every_s)
        outcomes = replay(requests, self._service, self._clock, watch)
        row = figures(outcomes)
        self._progress.note(f"{label}: {_summary(row)}")
        error = next((o.answer.error for o in outcomes if o.answer.error is not None), None)
        if error is not None:
            self._progress.note(f"{label}: the first of {row['errors']} errors: {error}")
        return outcomes

    def _warm_up(self, requests: Sequence[LoadRequest]) -> None:
        """A few together, not counted: the policy meets its shapes, and learns a little."""
        few = [
            replace(one, at_s=0.0, new_tokens=min(one.new_tokens, _WARM_UP_TOKENS))
            for one in requests[:_WARM_UP_REQUESTS]
        ]
        replay(few, self._service, self._clock)

    def _requests(self, point: Point, number: int) -> list[LoadRequest]:
        options = self._options
        prompts = fill_prompts(point.arrivals, self._texts, self._tokenize, options.seed)
        first_seed = options.seed + number * _SEEDS_OF_A_ROUND
        return [
            LoadRequest(
                arrival.at_s,
                arrival.category,
                prompt,
                arrival.output_tokens,
                options.temperature,
                first_seed + index,
                None if arrival.slo_ratio is None else arrival.slo_ratio * self.baseline_ms,
            )
            for index, (arrival, prompt) in enumerate(zip(point.arrivals, prompts, strict=True))
        ]


class _Ticker:
    """What a replay is at: always on a terminal, and now and then in a line that stays."""

    def __init__(self, label: str, total: int, progress: Progress, every_s: float) -> None:
        self._label, self._total, self._progress = label, total, progress
        self._next_s = self._every_s = every_s

    def __call__(self, elapsed_s: float, sent: int, running: int) -> None:
        line = (
            f"{self._label}: {elapsed_s:.0f} s, {sent}/{self._total} submitted, "
            f"{running} running, {sent - running} finished"
        )
        self._progress.show(line)
        if elapsed_s >= self._next_s:
            self._progress.note(line)
            self._next_s = elapsed_s + self._every_s


def point_result(
    point: Point, outcomes: Mapping[str, Sequence[Sequence[Outcome]]]
) -> dict[str, Any]:
    """Medians over rounds, also of ratios, which are taken within a round."""
    by_round = [
        with_ratios(dict(zip(outcomes, map(figures, found), strict=True)), BASELINES)
        for found in zip(*outcomes.values(), strict=True)
    ]
    return {**point.to_json(), "policies": medians(by_round)}


def _summary(row: Mapping[str, Any]) -> str:
    attained = "-" if row["attainment"] is None else f"{row['attainment']:.0%}"
    return f"{attained} attained, goodput {row['goodput_tokens_per_s']:.1f} tokens/s"


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
        "baseline_ms": bench.baseline_ms,
        "policies": list(options.policies),
    }
