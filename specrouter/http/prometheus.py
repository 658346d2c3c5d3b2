"""GET /metrics: the router's state in Prometheus' text format, or in OpenMetrics on request.

Contract: each application has a registry of its own, so that several routers may live in one
process. A scrape copies totals that were counted anyway, and never waits for a cycle. All values
are since the start of the engine. Units are in the names, times are seconds. Labels are bounded:
models, classes and replicas by the configuration, chains by `DecodeCounts`, positions by
`MAX_DEPTH`, estimates by `_TREES`. Some metrics also have vLLM's names, for dashboards and load
balancers that use them. Refusals are counted here, since most never reach the router.

`_TABLE` has every family that is read at a scrape: type, name (of counters without the suffix
`_total`, which the format adds), labels, source and help; `docs/metrics.md` describes them. A path
starts at a key of `sources`; in a mapping, it is followed for each entry, whose key is the label.
Values of a path that ends in `_ms` become seconds. The label `model_name`, which vLLM's metrics
have, is the target's name. Metrics of replicas exist only if there are replicas.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from operator import attrgetter
from re import MULTILINE, findall
from typing import Any, Literal, get_args

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from specrouter.engine.decode_counts import TIME_BOUNDS_S, TimeFigures
from specrouter.engine.engine_state import EngineState
from specrouter.engine.serving import ServingRouter
from specrouter.engine.slo_accounts import AdmissionCounts, SloAccounts, SloCounts
from specrouter.http.openapi import OPERATION
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.objective import BY_VALUE, NO_OBJECTIVE
from specrouter.request.params import Chain

Refusal = Literal["bad_request", "overloaded", "unavailable", "unauthorized"]
PREDICTED_TOKENS = (1, 8, 64)  # values of n for which T(n) is shown
_TREES = 64  # estimates of drafters and verifiers that are shown, those with most trials

_TABLE = """
gauge specrouter_requests_running = state.running: Requests that are being decoded.
gauge specrouter_requests_waiting = state.waiting: Requests that wait to be admitted.
gauge specrouter_request_rows = state.rows: Largest number of requests that can run together.
counter specrouter_prompt_tokens = decoded.prompt_tokens: Prompt tokens of admitted requests.
counter specrouter_generated_tokens = decoded.produced_tokens: Tokens of all outputs.
gauge specrouter_kv_reserved_tokens = state.kv_reserved_tokens: KV cache tokens held by running
    requests.
gauge specrouter_kv_capacity_tokens = state.kv_capacity_tokens: KV cache tokens that all requests
    may hold together.
counter specrouter_requests_refused{reason} = refusals: Requests that were refused before they were
    queued.
counter specrouter_slo_admitted_requests{slo_class} = admissions.admitted: Requests admitted with
    an objective.
counter specrouter_slo_best_effort_requests{slo_class} = admissions.best_effort: Requests admitted
    without an objective, or after being declined.
counter specrouter_slo_declined_requests{slo_class} = admissions.declined: Requests whose objective
    admission found to be unattainable.
counter specrouter_slo_rejected_requests{slo_class} = admissions.rejected: Declined requests that
    asked to be rejected, and were.
counter specrouter_slo_preemptions{slo_class} = admissions.preempted: Times that a running request
    had to give its row back.
counter specrouter_slo_judged_requests{slo_class} = ended.judged: Finished requests that had an
    objective.
counter specrouter_slo_attained_requests{slo_class} = ended.attained: Requests that attained their
    objective.
counter specrouter_slo_missed_requests{slo_class} = ended.missed: Requests that missed their
    objective.
counter specrouter_slo_implied_ttft_requests{slo_class} = ended.implied: Requests with a first
    token, and with a TTFT that was implied, not stated.
counter specrouter_slo_implied_ttft_kept_requests{slo_class} = ended.implied_kept: Requests whose
    first token came by the implied TTFT.
counter specrouter_slo_tokens{slo_class} = ended.tokens: Output tokens of finished requests.
counter specrouter_goodput_tokens{slo_class} = ended.attained_tokens: Output tokens of requests
    that attained their objective.
counter specrouter_slo_attained_stages{slo_class, stage} = stages_kept: Stages of outputs that kept
    their TPOT, by place.
counter specrouter_slo_missed_stages{slo_class, stage} = stages_missed: Stages of outputs that
    missed their TPOT, by place.
counter specrouter_model_forwards{model} = forwards: Forward passes of a model.
counter specrouter_model_tokens{model} = pack_tokens: Input tokens of a model's forward passes.
counter specrouter_model_seconds{model} = model_ms: Time spent in a model's forward passes.
gauge specrouter_model_predicted_seconds{model, tokens} = predicted_ms: T(n): predicted duration of
    a forward pass over n tokens.
gauge specrouter_model_loaded{model} = loaded: 1 if a model is loaded.
gauge specrouter_model_memory_bytes{model, kind} = memory: Memory of a model's weights and of its
    KV cache.
counter specrouter_model_quarantines{model} = quarantines: Failures after which a model was not
    used for a while.
gauge specrouter_model_quarantined{model} = quarantined: 1 while a model is not used after a
    failure.
gauge specrouter_similarity_ratio{drafter, verifier} = known.similarity: SimScore: 1 - total
    variation distance of two models' distributions.
gauge specrouter_predicted_acceptance_ratio{drafter, verifier, sampled} = promised: Acceptance rate
    predicted from the similarity, f(SimScore).
gauge specrouter_acceptance_ratio{proposers, verifier, sampled} = trees.alpha: Acceptance rate of
    the most likely child of an accepted node.
gauge specrouter_calibration_error_ratio{proposers, verifier, sampled} =
    trees.calibration.expected_error: Expected calibration error (ECE) of predicted acceptance.
gauge specrouter_calibration_brier_ratio{proposers, verifier, sampled} = trees.calibration.brier:
    Brier score (mean squared error) of predicted acceptance.
gauge specrouter_calibration_nodes{proposers, verifier, sampled} = trees.calibration.nodes: Nodes
    behind both errors, older ones with lower weight.
counter specrouter_chain_cycles{chain} = chains.cycles: Decoding cycles by chain, counted once for
    each request.
counter specrouter_chain_tokens{chain} = chains.tokens: Output tokens by chain.
counter specrouter_chain_switches = totals.switches: Changes of the chain or of the draft tree's
    shape.
gauge specrouter_speedup_ratio{requests} = speedups.ratio: Tokens per second with drafts over those
    without, measured at up to so many requests.
gauge specrouter_speedup_low_ratio{requests} = speedups.low: Lower end of its 95% interval.
gauge specrouter_speedup_high_ratio{requests} = speedups.high: Upper end of its 95% interval.
gauge specrouter_drafting_resting{requests} = speedups.is_resting: 1 while nothing is drafted, since
    drafting was measured to be slower.
counter specrouter_shadow_evaluations = totals.shadow_evaluations: Evaluations of idle drafters on
    committed text.
counter specrouter_exploration_seconds = totals.exploration_ms: Time that these evaluations cost.
counter specrouter_target_passes = totals.target_passes: Verifications by the target, counted once
    for each request.
counter specrouter_drafts = decoded.drafts: Verifications with at least one draft token.
counter specrouter_draft_tokens = decoded.drafted_tokens: Draft tokens that the target verified.
counter specrouter_accepted_tokens = decoded.accepted_tokens: Draft tokens that the target
    accepted.
counter specrouter_accepted_tokens_per_position{position} = decoded.accepted_at: Accepted draft
    tokens by position in the draft.
counter specrouter_budget_tokens = decoded.budget_tokens: Token budget of cycles that verify a
    selection of the drafted nodes.
counter specrouter_budgeted_draft_tokens = decoded.budgeted_tokens: Draft tokens that the target
    verified in these cycles.
histogram specrouter_cycle_seconds = decoded.cycle_times: Duration of a cycle.
histogram specrouter_inter_token_seconds = decoded.between_tokens: Inter-token latency; tokens of
    one cycle share its time evenly.
counter specrouter_logits_seconds = totals.logits_ms: Time spent on logits, sampling and selection
    of draft tokens.
counter specrouter_control_plane_seconds = totals.control_ms: Time of cycles spent outside of
    forward passes and logits.
gauge specrouter_control_plane_ratio = control_share: Share of the control plane in the duration of
    all cycles.
gauge specrouter_machine_slowdown_ratio = known.machine: Current slowdown of forward passes against
    the profile at load.
counter specrouter_prefix_cache_lookups = state.cache.lookups: Admitted requests whose prompts were
    looked up in the prefix cache.
counter specrouter_prefix_cache_hits = state.cache.hits: Those of them that found something.
counter specrouter_prefix_cache_lookup_tokens = state.cache.lookup_tokens: Their prompt tokens.
counter specrouter_prefix_cache_hit_tokens = state.cache.cached_tokens: Those of these tokens that
    were not read again.
counter specrouter_prefix_cache_evictions = state.cache.evictions: Blocks of cached prefixes that
    were given up for memory.
counter specrouter_prefix_cache_failures = state.cache.failures: Copies of cached prefixes that
    failed.
counter specrouter_kv_imported_tokens = state.cache.imported_tokens: Tokens whose keys and values
    another replica had read.
gauge specrouter_kv_cached_tokens = state.kv_cached_tokens: KV cache tokens that hold prefixes of
    requests that have ended.
counter specrouter_control_faults{part} = state.control_faults: Failures of parts of the control
    plane, without which requests went on.
gauge specrouter_replica_up{replica} = replicas.is_up: 1 if a replica takes requests.
gauge specrouter_replica_state_age_seconds{replica} = replicas.state_age_s: Since a replica reported
    its state.
gauge specrouter_replica_requests_running{replica} = replicas.running: Requests that are being
    decoded.
gauge specrouter_replica_requests_waiting{replica} = replicas.waiting: Requests that wait to be
    admitted.
gauge specrouter_replica_request_rows{replica} = replicas.rows: Requests that can run together.
gauge specrouter_replica_kv_usage_ratio{replica} = replicas.kv_share: Share of KV memory that is
    held.
counter specrouter_replica_attempts{replica} = replicas.attempts: Times that a sample was sent
    there.
counter specrouter_replica_declined{replica} = replicas.declined: Of them, times that it declined.
counter specrouter_replica_moves{replica, cause} = moves: Of them, times that the sample went on
    elsewhere, by cause.
gauge vllm:num_requests_running{model_name} = state.running: Running requests.
gauge vllm:num_requests_waiting{model_name} = state.waiting: Waiting requests.
gauge vllm:kv_cache_usage_perc{model_name} = kv_share: Share of the KV cache that is held, 1 is
    all.
counter vllm:prefix_cache_queries{model_name} = state.cache.lookup_tokens: Prompt tokens that were
    looked up.
counter vllm:prefix_cache_hits{model_name} = state.cache.cached_tokens: Prompt tokens that were
    found.
counter vllm:prompt_tokens{model_name} = decoded.prompt_tokens: Prompt tokens.
counter vllm:generation_tokens{model_name} = decoded.produced_tokens: Generated tokens.
counter vllm:spec_decode_num_drafts{model_name} = decoded.drafts: Verified drafts.
counter vllm:spec_decode_num_draft_tokens{model_name} = decoded.drafted_tokens: Verified draft
    tokens.
counter vllm:spec_decode_num_accepted_tokens{model_name} = decoded.accepted_tokens: Accepted draft
    tokens.
counter vllm:spec_decode_num_accepted_tokens_per_pos{model_name, position} = decoded.accepted_at:
    Accepted draft tokens by position in the draft.
histogram vllm:inter_token_latency_seconds{model_name} = decoded.between_tokens: Inter-token
    latency; tokens of one cycle share its time evenly.
histogram vllm:time_per_output_token_seconds{model_name} = decoded.between_tokens: Inter-token
    latency; tokens of one cycle share its time evenly.
"""


def add_metrics(app: FastAPI, router: ServingRouter) -> None:
    """Add the endpoint, and give the application the counter of `count_refusal`."""
    app.state.refusals = dict.fromkeys(get_args(Refusal), 0)  # all kinds exist from the start
    registry = CollectorRegistry()
    registry.register(RouterCollector(router, app.state.refusals))

    @app.get(
        "/metrics",
        tags=[OPERATION],
        summary="Prometheus metrics, as text",
        response_class=PlainTextResponse,
    )
    def metrics(request: Request) -> Response:  # not async, since it waits for locks
        encode, content_type = _encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})


def _encoder(accepted: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """Return the encoder and the content type for the header `Accept`.

    It is the plain format if a version in `accepted` cannot be compared ("0.0.4" in quotes, "x").
    """
    try:
        return choose_encoder(accepted)
    except (TypeError, ValueError):
        return choose_encoder("")


def count_refusal(app: FastAPI, reason: Refusal) -> None:
    """Count a request that was refused before it was queued; no effect without `add_metrics`."""
    if hasattr(app.state, "refusals"):
        app.state.refusals[reason] += 1


class RouterCollector(Collector):
    def __init__(self, router: ServingRouter, refusals: Mapping[str, int]) -> None:
        self._router, self._refusals = router, refusals

    def collect(self) -> Iterator[Metric]:
        yield from self._router.instruments.ended_requests()
        found = {"refusals": self._refusals, **sources(self._router)}
        yield from families(found, self._router.pool.target)


def families(sources: Mapping[str, Any], target: str) -> Iterator[Metric]:
    for kind, name, labels, path, text in _ROWS:
        family = _KINDS[kind](name, text, labels=labels)
        known = (target,) if "model_name" in labels else ()
        values = _values(sources, path)
        for key, value in values.items():
            _add(family, (*known, *key), value)
        if values or "replica" not in labels:
            yield family


def _values(sources: Mapping[str, Any], path: str) -> Mapping[tuple[str, ...], Any]:
    """Return the values at a path, by the values of their labels."""
    first, _, rest = path.partition(".")
    found = sources[first]
    if rest:
        read = attrgetter(rest)
        is_each = isinstance(found, Mapping)
        found = {key: read(one) for key, one in found.items()} if is_each else read(found)
    if isinstance(found, tuple):
        found = {str(place): one for place, one in enumerate(found)}
    values = found if isinstance(found, Mapping) else {(): found}
    per_unit = 1000 if path.endswith("_ms") else None
    return {
        key if isinstance(key, tuple) else (key,): one / per_unit if per_unit else one
        for key, one in values.items()
        if one is not None
    }


def _add(family: Metric, labels: tuple[str, ...], value: float | TimeFigures) -> None:
    if isinstance(value, TimeFigures):
        assert isinstance(family, HistogramMetricFamily)
        bounds = (*map(floatToGoString, TIME_BOUNDS_S), "+Inf")
        family.add_metric(labels, list(zip(bounds, value.counts, strict=True)), value.sum_s)
    else:
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(labels, value)


_KINDS = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_ROWS = [
    (kind, name, findall(r"\w+", labels), path, " ".join(text.split()))
    for kind, name, labels, path, text in findall(
        r"^(\w+) ([\w:]+)({.*?})?\s+=\s+([\w.]+):\s+(.*(?:\n    .*)*)", _TABLE, MULTILINE
    )
]


def sources(router: ServingRouter) -> dict[str, Any]:
    """Return what the table of metrics reads, by the first name of its paths."""
    instruments = router.instruments
    state, decoded = instruments.engine_state(), instruments.decoded()
    totals, known = instruments.statistics(), instruments.performance()
    replicas = instruments.replicas()
    return {
        "state": state,
        "decoded": decoded,
        "totals": totals,
        "known": known,
        "control_share": totals.control_ms / totals.cycle_ms if totals.cycle_ms else 0.0,
        "kv_share": state.kv_reserved_tokens / state.kv_capacity_tokens,
        "chains": {_joined(chain): counts for chain, counts in decoded.chains.items()},
        "replicas": replicas,
        "speedups": {str(load): one for load, one in state.speedups.items()},
        "moves": {
            (name, cause): count
            for name, one in replicas.items()
            for cause, count in one.moves.items()
        },
        **objective_sources(instruments.slo_accounts, router.slo_classes),
        **_model_sources(router.pool.names, state, totals, known),
        **_estimate_sources(known),
    }


def objective_sources(accounts: SloAccounts, configured: Iterable[str]) -> dict[str, Any]:
    """Return what admission decided about objectives, and which were attained, by class.

    `configured`: classes that are shown from the start, so that their first request is an increase.
    """
    classes = (*configured, BY_VALUE, NO_OBJECTIVE)
    stages = {
        (slo_class, str(place)): pair
        for slo_class, pairs in accounts.stages().items()
        for place, pair in enumerate(pairs)
    }
    return {
        "admissions": {**dict.fromkeys(classes, AdmissionCounts()), **accounts.admissions()},
        "ended": {**dict.fromkeys(classes, SloCounts()), **accounts.counts()},
        "stages_kept": {key: kept for key, (_, kept) in stages.items()},
        "stages_missed": {key: all_ - kept for key, (all_, kept) in stages.items()},
    }


def _model_sources(
    names: Sequence[str],
    state: EngineState,
    totals: EngineStatistics,
    known: PerformanceSnapshot,
) -> dict[str, Any]:
    def counted(values: Mapping[str, float]) -> dict[str, float]:
        return {name: values.get(name, 0) for name in names}

    memory = {"weights": state.weight_bytes, "kv": state.kv_bytes}
    return {
        "forwards": counted(totals.forwards),
        "pack_tokens": counted(totals.pack_tokens),
        "model_ms": counted(totals.model_ms),
        "predicted_ms": {
            (name, str(tokens)): known.machine * curve.at(tokens)
            for name, curve in known.times.items()
            for tokens in PREDICTED_TOKENS
        },
        "loaded": {name: float(name in state.weight_bytes) for name in names},
        "memory": {
            (name, kind): held.get(name, 0) for kind, held in memory.items() for name in names
        },
        "quarantines": counted(state.quarantines),
        "quarantined": {name: float(name in state.quarantined) for name in names},
    }


def _estimate_sources(known: PerformanceSnapshot) -> dict[str, Any]:
    shown = nlargest(_TREES, known.trees.items(), key=lambda each: each[1].trials)
    return {
        "trees": {
            (_joined(proposers), verifier, str(sampled).lower()): tree
            for (proposers, verifier, sampled), tree in shown
        },
        "promised": {
            (drafter, verifier, str(sampled).lower()): alpha
            for (drafter, verifier, sampled), alpha in known.promised_alpha.items()
        },
    }


def _joined(chain: Chain) -> str:
    return ">".join(chain)
