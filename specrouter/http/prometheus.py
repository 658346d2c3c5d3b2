"""RouterCollector: the router's state as Prometheus reads it, at the moment of a scrape.

Contract: a scrape copies totals that were counted anyway, and never waits for a cycle. All values
are since the start of the engine, one that began anew after a failure starts at 0 as a process
would. Units are in the names, times are seconds. Labels are bounded: models and classes by the
configuration, chains by `DecodeCounts`, positions by `MAX_DEPTH`, estimates by `_TREES`.
`docs/metrics.md` describes every family. vLLM's names stand beside ours: tools know them.

Not here: refusals, which the HTTP layer counts (`specrouter.http.metrics_page`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from modelpool import ModelPool
from specrouter.engine.engine import EngineState
from specrouter.profile.decode_counts import TIME_BOUNDS_S, DecodeFigures, TimeFigures
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.objective import BY_VALUE, NO_OBJECTIVE
from specrouter.request.params import Chain
from specrouter.router import ChainRouter
from specrouter.slo.accounts import SloCounts

PREDICTED_TOKENS = (1, 8, 64)  # n of the T(n) that are shown
_TREES = 64  # estimates of proposers and verifiers that are shown, those with most evidence

Labels = tuple[str, ...]
Values = Mapping[Labels, float] | float


class RouterCollector(Collector):
    def __init__(self, router: ChainRouter) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        router = self._router
        state, decoded = router.engine_state(), router.decoded()
        totals, known = router.statistics(), router.performance()
        counts = _with_every_class(router.slo_counts(), router.slo_classes)
        yield from router.ended_requests()
        yield from _requests(state, decoded)
        yield from _objectives(counts)
        yield from _models(router.pool, state, totals, known)
        yield from _estimates(known)
        yield from _chains(decoded, totals)
        yield from _drafts(decoded, totals)
        yield from _engine(decoded, totals, known, router.restarts)
        yield from _vllm(router.pool.target, state, decoded)


def _requests(state: EngineState, decoded: DecodeFigures) -> Iterator[Metric]:
    yield _gauge("specrouter_requests_running", "Requests that have a row.", state.running)
    yield _gauge("specrouter_requests_waiting", "Requests that wait for a row.", state.waiting)
    yield _gauge("specrouter_request_rows", "Requests that can run together.", state.rows)
    yield _counter(
        "specrouter_prompt_tokens", "Of requests that were given a row.", decoded.prompt_tokens
    )
    yield _counter("specrouter_generated_tokens", "Of all texts.", decoded.produced_tokens)
    yield _gauge(
        "specrouter_kv_reserved_tokens",
        "That running requests may need in the KV memory.",
        state.kv_reserved_tokens,
    )
    yield _gauge(
        "specrouter_kv_capacity_tokens",
        "That all rows may reserve together.",
        state.kv_capacity_tokens,
    )


def _objectives(counts: Mapping[str, SloCounts]) -> Iterator[Metric]:
    def of(value: Callable[[SloCounts], float]) -> Values:
        return {(name,): value(each) for name, each in counts.items()}

    classes = ("slo_class",)
    yield _counter(
        "specrouter_slo_judged_requests",
        "Requests with an objective that have ended.",
        of(lambda each: each.judged),
        classes,
    )
    yield _counter(
        "specrouter_slo_attained_requests",
        "Requests that attained their objective.",
        of(lambda each: each.attained),
        classes,
    )
    yield _counter(
        "specrouter_slo_tokens",
        "Tokens of requests that have ended.",
        of(lambda each: each.tokens),
        classes,
    )
    yield _counter(
        "specrouter_goodput_tokens",
        "Tokens of requests that attained their objective.",
        of(lambda each: each.attained_tokens),
        classes,
    )


def _models(
    pool: ModelPool, state: EngineState, totals: EngineStatistics, known: PerformanceSnapshot
) -> Iterator[Metric]:
    def of(value: Callable[[str], float]) -> Values:
        return {(name,): value(name) for name in pool.names}

    model = ("model",)
    yield _counter(
        "specrouter_model_forwards",
        "Forwards of a model.",
        of(lambda name: totals.forwards.get(name, 0)),
        model,
    )
    yield _counter(
        "specrouter_model_tokens",
        "Tokens that a model's forwards read.",
        of(lambda name: totals.pack_tokens.get(name, 0)),
        model,
    )
    yield _counter(
        "specrouter_model_seconds",
        "Time in a model's forwards.",
        of(lambda name: totals.model_ms.get(name, 0.0) / 1000),
        model,
    )
    yield _gauge(
        "specrouter_model_predicted_seconds",
        "T(n): what a forward over so many tokens is predicted to take.",
        {
            (name, str(tokens)): known.machine * curve.at(tokens) / 1000
            for name, curve in known.times.items()
            for tokens in PREDICTED_TOKENS
        },
        ("model", "tokens"),
    )
    yield _gauge(
        "specrouter_model_loaded",
        "1 where a model can be used at once.",
        of(lambda name: float(pool.is_loaded(name))),
        model,
    )
    yield _gauge(
        "specrouter_model_memory_bytes",
        "Of a model's weights and of its KV store, as far as they are in memory.",
        {
            **{(name, "weights"): _weight_bytes(pool, name) for name in pool.names},
            **{(name, "kv"): state.kv_bytes.get(name, 0) for name in pool.names},
        },
        ("model", "kind"),
    )
    yield _counter(
        "specrouter_model_quarantines",
        "Times that a model failed and was put to rest.",
        of(lambda name: state.quarantines.get(name, 0)),
        model,
    )
    yield _gauge(
        "specrouter_model_quarantined",
        "1 while a model rests.",
        of(lambda name: float(name in state.quarantined)),
        model,
    )


def _weight_bytes(pool: ModelPool, name: str) -> int:
    if pool.is_weightless(name) or not pool.is_loaded(name):
        return 0
    return pool.plan(name).footprint.weight_bytes


def _estimates(known: PerformanceSnapshot) -> Iterator[Metric]:
    yield _gauge(
        "specrouter_similarity_ratio",
        "SimScore: 1 - the distance of two models' distributions (total variation).",
        {(drafter, verifier): score for (drafter, verifier), score in known.similarity.items()},
        ("drafter", "verifier"),
    )
    yield _gauge(
        "specrouter_predicted_acceptance_ratio",
        "alpha = f(SimScore).",
        {
            (drafter, verifier, _flag(sampled)): alpha
            for (drafter, verifier, sampled), alpha in known.promised_alpha.items()
        },
        ("drafter", "verifier", "sampled"),
    )
    shown = nlargest(_TREES, known.trees.items(), key=lambda each: each[1].trials)
    labels = ("proposers", "inner_rounds", "verifier", "sampled")
    keys = [
        (_joined(proposers), str(rounds), verifier, _flag(sampled))
        for (proposers, rounds, verifier, sampled), _ in shown
    ]
    trees = [each for _, each in shown]
    calibrations = [each.calibration for each in trees]

    def gauge(name: str, documentation: str, values: Iterable[float]) -> Metric:
        return _gauge(name, documentation, dict(zip(keys, values, strict=True)), labels)

    yield gauge(
        "specrouter_acceptance_ratio",
        "How often the best child of an accepted node was accepted.",
        (each.alpha for each in trees),
    )
    yield gauge(
        "specrouter_calibration_error_ratio",
        "ECE: mean distance of predicted and observed acceptance.",
        (each.expected_error for each in calibrations),
    )
    yield gauge(
        "specrouter_calibration_brier_ratio",
        "Mean squared error of predicted acceptances.",
        (each.brier for each in calibrations),
    )
    yield gauge(
        "specrouter_calibration_nodes",
        "Nodes that the two errors rest on, older ones faded.",
        (each.nodes for each in calibrations),
    )


def _chains(decoded: DecodeFigures, totals: EngineStatistics) -> Iterator[Metric]:
    chains = {(_joined(chain),): counts for chain, counts in decoded.chains.items()}
    yield _counter(
        "specrouter_chain_cycles",
        "Requests' cycles that went through a chain.",
        {chain: counts.cycles for chain, counts in chains.items()},
        ("chain",),
    )
    yield _counter(
        "specrouter_chain_tokens",
        "Tokens that were committed through a chain.",
        {chain: counts.tokens for chain, counts in chains.items()},
        ("chain",),
    )
    yield _counter(
        "specrouter_chain_switches",
        "Times that another chain or shape of trees came into use.",
        totals.switches,
    )
    yield _counter(
        "specrouter_probes", "Times that an idle drafter was heard or tried.", totals.probes
    )
    yield _counter(
        "specrouter_probe_seconds",
        "Time that this cost beyond the best chain's.",
        totals.probe_ms / 1000,
    )


def _drafts(decoded: DecodeFigures, totals: EngineStatistics) -> Iterator[Metric]:
    yield _counter(
        "specrouter_target_passes",
        "Cycles in which a request was verified, over all requests.",
        totals.target_passes,
    )
    yield _counter("specrouter_drafts", "Those of them with drafted tokens.", decoded.drafts)
    yield _counter(
        "specrouter_draft_tokens",
        "Drafted tokens that the target verified.",
        decoded.drafted_tokens,
    )
    yield _counter(
        "specrouter_accepted_tokens", "Those of them that it accepted.", decoded.accepted_tokens
    )
    yield _counter(
        "specrouter_accepted_tokens_per_position",
        "Accepted tokens by their position in the draft.",
        _by_position(decoded),
        ("position",),
    )
    yield _counter(
        "specrouter_budget_tokens",
        "Drafted tokens that cycles with a selection of nodes had planned with.",
        decoded.budget_tokens,
    )
    yield _counter(
        "specrouter_budgeted_draft_tokens",
        "Drafted tokens that the target verified in these cycles.",
        decoded.budgeted_tokens,
    )


def _engine(
    decoded: DecodeFigures, totals: EngineStatistics, known: PerformanceSnapshot, restarts: int
) -> Iterator[Metric]:
    yield _histogram("specrouter_cycle_seconds", "Time of a cycle.", decoded.cycle_times)
    yield _histogram(
        "specrouter_inter_token_seconds",
        "Time between tokens of a request; those that come together share it.",
        decoded.between_tokens,
    )
    yield _counter(
        "specrouter_logits_seconds", "Time on logits and drafts.", totals.logits_ms / 1000
    )
    yield _counter(
        "specrouter_control_plane_seconds",
        "Time of cycles that was spent neither in forwards nor on logits.",
        totals.control_ms / 1000,
    )
    yield _gauge(
        "specrouter_control_plane_ratio",
        "Share of the control plane in the time of all cycles.",
        totals.control_ms / totals.cycle_ms if totals.cycle_ms else 0.0,
    )
    yield _gauge(
        "specrouter_machine_slowdown_ratio",
        "How slow the machine is now, against its quiet self.",
        known.machine,
    )
    yield _counter("specrouter_restarts", "Times that the engine began anew.", restarts)


def _vllm(target: str, state: EngineState, decoded: DecodeFigures) -> Iterator[Metric]:
    name, model = ("model_name",), (target,)
    used = state.kv_reserved_tokens / state.kv_capacity_tokens
    yield _gauge("vllm:num_requests_running", "Running requests.", {model: state.running}, name)
    yield _gauge("vllm:num_requests_waiting", "Waiting requests.", {model: state.waiting}, name)
    yield _gauge("vllm:kv_cache_usage_perc", "Reserved KV memory, 1 is all.", {model: used}, name)
    yield _counter("vllm:prompt_tokens", "Prompt tokens.", {model: decoded.prompt_tokens}, name)
    yield _counter(
        "vllm:generation_tokens", "Generated tokens.", {model: decoded.produced_tokens}, name
    )
    yield _counter(
        "vllm:spec_decode_num_drafts", "Drafts that were verified.", {model: decoded.drafts}, name
    )
    yield _counter(
        "vllm:spec_decode_num_draft_tokens",
        "Drafted tokens that were verified.",
        {model: decoded.drafted_tokens},
        name,
    )
    yield _counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Drafted tokens that were accepted.",
        {model: decoded.accepted_tokens},
        name,
    )
    yield _counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens by their position in the draft.",
        {(target, *position): count for position, count in _by_position(decoded).items()},
        ("model_name", "position"),
    )
    for family in ("inter_token_latency", "time_per_output_token"):  # its later and its old name
        yield _histogram(
            f"vllm:{family}_seconds",
            "Time between tokens of a request; those that come together share it.",
            decoded.between_tokens,
            name,
            model,
        )


def _by_position(decoded: DecodeFigures) -> dict[Labels, float]:
    return {(str(position),): count for position, count in enumerate(decoded.accepted_at)}


def _with_every_class(
    counts: Mapping[str, SloCounts], configured: Iterable[str]
) -> dict[str, SloCounts]:
    """Classes show up before their first request ends, so that it is an increase."""
    empty = dict.fromkeys((*configured, BY_VALUE, NO_OBJECTIVE), SloCounts())
    return {**empty, **counts}


def _joined(chain: Chain) -> str:
    return ">".join(chain)


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _counter(name: str, documentation: str, values: Values, labels: Sequence[str] = ()) -> Metric:
    """`name` is without the ending `_total`, which the format adds."""
    return _filled(CounterMetricFamily(name, documentation, labels=labels), values)


def _gauge(name: str, documentation: str, values: Values, labels: Sequence[str] = ()) -> Metric:
    return _filled(GaugeMetricFamily(name, documentation, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
        family.add_metric(labels, value)
    return family


def _histogram(
    name: str,
    documentation: str,
    times: TimeFigures,
    labels: Sequence[str] = (),
    values: Sequence[str] = (),
) -> Metric:
    family = HistogramMetricFamily(name, documentation, labels=labels)
    bounds = (*map(floatToGoString, TIME_BOUNDS_S), "+Inf")
    family.add_metric(values, list(zip(bounds, times.counts, strict=True)), times.sum_s)
    return family
