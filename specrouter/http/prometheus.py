"""RouterCollector: the router's state as Prometheus reads it, at the moment of a scrape.

Contract: a scrape copies totals that were counted anyway, and never waits for a cycle. All values
are since the start of the engine, one that began anew after a failure starts at 0 as a process
would. Units are in the names, times are seconds. Labels are bounded: models and classes by the
configuration, chains by `DecodeCounts`, positions by `MAX_DEPTH`, estimates by `_TREES`.
`docs/metrics.md` describes every family. vLLM's names stand beside ours: tools know them.

Not here: refusals, which the HTTP layer counts (`specrouter.http.metrics_page`).
"""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specrouter.engine.decode_counts import DecodeFigures
from specrouter.engine.engine_state import EngineState
from specrouter.engine.serving import ServingRouter
from specrouter.http.prometheus_families import (
    by_position,
    counter,
    gauge,
    histogram,
    joined,
)
from specrouter.http.prometheus_models import estimate_metrics, model_metrics
from specrouter.http.prometheus_objectives import objective_metrics
from specrouter.http.prometheus_vllm import vllm_metrics
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot


class RouterCollector(Collector):
    def __init__(self, router: ServingRouter) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        router = self._router
        state, decoded = router.engine_state(), router.decoded()
        totals, known = router.statistics(), router.performance()
        yield from router.ended_requests()
        yield from _requests(state, decoded)
        yield from objective_metrics(router.slo_accounts, router.slo_classes)
        yield gauge(
            "specrouter_slo_pace_margin_ratio",
            "Share of every TPOT objective that admission keeps back.",
            state.pace_margin,
        )
        yield from model_metrics(router.pool.names, state, totals, known)
        yield from estimate_metrics(known)
        yield from _chains(decoded, totals)
        yield from _drafts(decoded, totals)
        yield from _engine(decoded, totals, known)
        yield from _prefixes(state)
        yield from _failures(state, router.restarts)
        yield from vllm_metrics(router.pool.target, state, decoded)
        yield from router.replica_metrics()


def _requests(state: EngineState, decoded: DecodeFigures) -> Iterator[Metric]:
    yield gauge("specrouter_requests_running", "Requests that are being decoded.", state.running)
    yield gauge("specrouter_requests_waiting", "Requests that wait to be admitted.", state.waiting)
    yield gauge(
        "specrouter_request_rows", "Largest number of requests that can run together.", state.rows
    )
    yield counter(
        "specrouter_prompt_tokens", "Prompt tokens of admitted requests.", decoded.prompt_tokens
    )
    yield counter("specrouter_generated_tokens", "Tokens of all outputs.", decoded.produced_tokens)
    yield gauge(
        "specrouter_kv_reserved_tokens",
        "KV cache tokens reserved by running requests.",
        state.kv_reserved_tokens,
    )
    yield gauge(
        "specrouter_kv_capacity_tokens",
        "KV cache tokens that all requests may reserve together.",
        state.kv_capacity_tokens,
    )


def _chains(decoded: DecodeFigures, totals: EngineStatistics) -> Iterator[Metric]:
    chains = {(joined(chain),): counts for chain, counts in decoded.chains.items()}
    yield counter(
        "specrouter_chain_cycles",
        "Decoding cycles by chain, counted once for each request.",
        {chain: counts.cycles for chain, counts in chains.items()},
        ("chain",),
    )
    yield counter(
        "specrouter_chain_tokens",
        "Output tokens by chain.",
        {chain: counts.tokens for chain, counts in chains.items()},
        ("chain",),
    )
    yield counter(
        "specrouter_chain_switches",
        "Changes of the chain or of the draft tree's shape.",
        totals.switches,
    )
    yield counter(
        "specrouter_shadow_evaluations",
        "Evaluations of idle drafters on committed text.",
        totals.shadow_evaluations,
    )
    yield counter(
        "specrouter_exploration_seconds",
        "Time that these evaluations cost.",
        totals.exploration_ms / 1000,
    )


def _drafts(decoded: DecodeFigures, totals: EngineStatistics) -> Iterator[Metric]:
    yield counter(
        "specrouter_target_passes",
        "Verifications by the target, counted once for each request.",
        totals.target_passes,
    )
    yield counter(
        "specrouter_drafts", "Verifications with at least one draft token.", decoded.drafts
    )
    yield counter(
        "specrouter_draft_tokens",
        "Draft tokens that the target verified.",
        decoded.drafted_tokens,
    )
    yield counter(
        "specrouter_accepted_tokens",
        "Draft tokens that the target accepted.",
        decoded.accepted_tokens,
    )
    yield counter(
        "specrouter_accepted_tokens_per_position",
        "Accepted draft tokens by position in the draft.",
        by_position(decoded),
        ("position",),
    )
    yield counter(
        "specrouter_budget_tokens",
        "Token budget of cycles that verify a selection of the drafted nodes.",
        decoded.budget_tokens,
    )
    yield counter(
        "specrouter_budgeted_draft_tokens",
        "Draft tokens that the target verified in these cycles.",
        decoded.budgeted_tokens,
    )


def _engine(
    decoded: DecodeFigures, totals: EngineStatistics, known: PerformanceSnapshot
) -> Iterator[Metric]:
    yield histogram("specrouter_cycle_seconds", "Duration of a cycle.", decoded.cycle_times)
    yield histogram(
        "specrouter_inter_token_seconds",
        "Inter-token latency; tokens of one cycle share its time evenly.",
        decoded.between_tokens,
    )
    yield counter(
        "specrouter_logits_seconds",
        "Time spent on logits, sampling and selection of draft tokens.",
        totals.logits_ms / 1000,
    )
    yield counter(
        "specrouter_control_plane_seconds",
        "Time of cycles spent outside of forward passes and logits.",
        totals.control_ms / 1000,
    )
    yield gauge(
        "specrouter_control_plane_ratio",
        "Share of the control plane in the duration of all cycles.",
        totals.control_ms / totals.cycle_ms if totals.cycle_ms else 0.0,
    )
    yield gauge(
        "specrouter_machine_slowdown_ratio",
        "Current slowdown of forward passes against the profile at load.",
        known.machine,
    )


def _prefixes(state: EngineState) -> Iterator[Metric]:
    counts = state.cache
    yield counter(
        "specrouter_prefix_cache_lookups",
        "Admitted requests whose prompts were looked up in the prefix cache.",
        counts.lookups,
    )
    yield counter(
        "specrouter_prefix_cache_hits", "Those of them that found something.", counts.hits
    )
    yield counter(
        "specrouter_prefix_cache_lookup_tokens", "Their prompt tokens.", counts.lookup_tokens
    )
    yield counter(
        "specrouter_prefix_cache_hit_tokens",
        "Those of these tokens that were not read again.",
        counts.cached_tokens,
    )
    yield counter(
        "specrouter_prefix_cache_evictions",
        "Cached prefixes that were dropped for memory.",
        counts.evictions,
    )
    yield counter(
        "specrouter_prefix_cache_failures",
        "Copies of cached prefixes that failed.",
        counts.failures,
    )
    yield counter(
        "specrouter_kv_imported_tokens",
        "Tokens whose keys and values another replica had read.",
        counts.imported_tokens,
    )
    yield gauge(
        "specrouter_kv_cached_tokens",
        "KV cache tokens that hold prefixes of requests that have ended.",
        state.kv_cached_tokens,
    )


def _failures(state: EngineState, restarts: int) -> Iterator[Metric]:
    yield counter("specrouter_restarts", "Restarts of the engine after a failure.", restarts)
    yield counter(
        "specrouter_control_faults",
        "Failures of parts of the control plane, without which requests went on.",
        {(part,): count for part, count in state.control_faults.items()},
        ("part",),
    )
