"""RouterCollector: the router's state as Prometheus reads it, at the moment of a scrape.

Contract: a scrape copies totals that were counted anyway, and never waits for a cycle. All values
are since the start of the engine, one that began anew after a failure starts at 0 as a process
would. Units are in the names, times are seconds. Labels are bounded: models and classes by the
configuration, chains by `DecodeCounts`, positions by `MAX_DEPTH`, estimates by `_TREES`.
vLLM's names stand beside ours: dashboards and load balancers know them.

Not here: refusals, which the HTTP layer counts (`specrouter.http.metrics_page`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specrouter.engine.decode_counts import TIME_BOUNDS_S, DecodeFigures, TimeFigures
from specrouter.engine.engine_state import EngineState
from specrouter.engine.serving import ServingRouter
from specrouter.engine.slo_accounts import AdmissionCounts, SloAccounts, SloCounts
from specrouter.http.metric_table import Distribution, Value, Values, families
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.objective import BY_VALUE, NO_OBJECTIVE
from specrouter.request.params import Chain

PREDICTED_TOKENS = (1, 8, 64)  # n of the T(n) that are shown
_TREES = 64  # estimates of drafters and verifiers that are shown, those with most evidence

Named = dict[str, Values]  # by the family's name
_Counts = TypeVar("_Counts")


class RouterCollector(Collector):
    def __init__(self, router: ServingRouter) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        router = self._router
        state, decoded = router.instruments.engine_state(), router.instruments.decoded()
        totals, known = router.instruments.statistics(), router.instruments.performance()
        yield from router.instruments.ended_requests()
        yield from families(
            {
                **engine_values(state, decoded, totals, known),
                **draft_values(decoded, totals),
                **cache_values(state),
                **objective_values(router.instruments.slo_accounts, router.slo_classes),
                **model_values(router.pool.names, state, totals, known),
                **estimate_values(known),
                **vllm_values(router.pool.target, state, decoded),
                "specrouter_restarts": router.instruments.restarts,
            }
        )
        yield from router.instruments.replica_metrics()


def engine_values(
    state: EngineState,
    decoded: DecodeFigures,
    totals: EngineStatistics,
    known: PerformanceSnapshot,
) -> Named:
    return {
        "specrouter_requests_running": state.running,
        "specrouter_requests_waiting": state.waiting,
        "specrouter_request_rows": state.rows,
        "specrouter_prompt_tokens": decoded.prompt_tokens,
        "specrouter_generated_tokens": decoded.produced_tokens,
        "specrouter_kv_reserved_tokens": state.kv_reserved_tokens,
        "specrouter_kv_capacity_tokens": state.kv_capacity_tokens,
        "specrouter_slo_pace_margin_ratio": state.pace_margin,
        "specrouter_cycle_seconds": _times(decoded.cycle_times),
        "specrouter_inter_token_seconds": _times(decoded.between_tokens),
        "specrouter_logits_seconds": totals.logits_ms / 1000,
        "specrouter_control_plane_seconds": totals.control_ms / 1000,
        "specrouter_control_plane_ratio": (
            totals.control_ms / totals.cycle_ms if totals.cycle_ms else 0.0
        ),
        "specrouter_machine_slowdown_ratio": known.machine,
        "specrouter_control_faults": {
            (part,): count for part, count in state.control_faults.items()
        },
    }


def draft_values(decoded: DecodeFigures, totals: EngineStatistics) -> Named:
    chains = {(_joined(chain),): counts for chain, counts in decoded.chains.items()}
    return {
        "specrouter_chain_cycles": {chain: counts.cycles for chain, counts in chains.items()},
        "specrouter_chain_tokens": {chain: counts.tokens for chain, counts in chains.items()},
        "specrouter_chain_switches": totals.switches,
        "specrouter_shadow_evaluations": totals.shadow_evaluations,
        "specrouter_exploration_seconds": totals.exploration_ms / 1000,
        "specrouter_target_passes": totals.target_passes,
        "specrouter_drafts": decoded.drafts,
        "specrouter_draft_tokens": decoded.drafted_tokens,
        "specrouter_accepted_tokens": decoded.accepted_tokens,
        "specrouter_accepted_tokens_per_position": {
            (str(position),): count for position, count in enumerate(decoded.accepted_at)
        },
        "specrouter_budget_tokens": decoded.budget_tokens,
        "specrouter_budgeted_draft_tokens": decoded.budgeted_tokens,
    }


def cache_values(state: EngineState) -> Named:
    counts = state.cache
    return {
        "specrouter_prefix_cache_lookups": counts.lookups,
        "specrouter_prefix_cache_hits": counts.hits,
        "specrouter_prefix_cache_lookup_tokens": counts.lookup_tokens,
        "specrouter_prefix_cache_hit_tokens": counts.cached_tokens,
        "specrouter_prefix_cache_evictions": counts.evictions,
        "specrouter_prefix_cache_failures": counts.failures,
        "specrouter_kv_imported_tokens": counts.imported_tokens,
        "specrouter_kv_cached_tokens": state.kv_cached_tokens,
    }


def objective_values(accounts: SloAccounts, configured: Iterable[str]) -> Named:
    """What admission decided about objectives, and which were attained, by class.

    `configured`: classes, which show up before their first request, so that it is an increase.
    """
    classes = (*configured, BY_VALUE, NO_OBJECTIVE)
    admissions = {**dict.fromkeys(classes, AdmissionCounts()), **accounts.admissions()}
    ended = {**dict.fromkeys(classes, SloCounts()), **accounts.counts()}
    stages = {
        (slo_class, str(place)): pair
        for slo_class, pairs in accounts.stages().items()
        for place, pair in enumerate(pairs)
    }
    return {
        "specrouter_slo_admitted_requests": _each(admissions, lambda one: one.admitted),
        "specrouter_slo_best_effort_requests": _each(admissions, lambda one: one.best_effort),
        "specrouter_slo_declined_requests": _each(admissions, lambda one: one.declined),
        "specrouter_slo_rejected_requests": _each(admissions, lambda one: one.rejected),
        "specrouter_slo_preemptions": _each(admissions, lambda one: one.preempted),
        "specrouter_slo_judged_requests": _each(ended, lambda one: one.judged),
        "specrouter_slo_attained_requests": _each(ended, lambda one: one.attained),
        "specrouter_slo_missed_requests": _each(ended, lambda one: one.judged - one.attained),
        "specrouter_slo_implied_ttft_requests": _each(ended, lambda one: one.implied),
        "specrouter_slo_implied_ttft_kept_requests": _each(ended, lambda one: one.implied_kept),
        "specrouter_slo_tokens": _each(ended, lambda one: one.tokens),
        "specrouter_goodput_tokens": _each(ended, lambda one: one.attained_tokens),
        "specrouter_slo_attained_stages": {key: kept for key, (_, kept) in stages.items()},
        "specrouter_slo_missed_stages": {key: all_ - kept for key, (all_, kept) in stages.items()},
    }


def model_values(
    names: Sequence[str],
    state: EngineState,
    totals: EngineStatistics,
    known: PerformanceSnapshot,
) -> Named:
    def counted(values: Mapping[str, float]) -> Values:
        return {(name,): values.get(name, 0) for name in names}

    memory = {"weights": state.weight_bytes, "kv": state.kv_bytes}
    return {
        "specrouter_model_forwards": counted(totals.forwards),
        "specrouter_model_tokens": counted(totals.pack_tokens),
        "specrouter_model_seconds": {
            (name,): totals.model_ms.get(name, 0.0) / 1000 for name in names
        },
        "specrouter_model_predicted_seconds": {
            (name, str(tokens)): known.machine * curve.at(tokens) / 1000
            for name, curve in known.times.items()
            for tokens in PREDICTED_TOKENS
        },
        "specrouter_model_loaded": {(name,): float(name in state.weight_bytes) for name in names},
        "specrouter_model_memory_bytes": {
            (name, kind): held.get(name, 0) for kind, held in memory.items() for name in names
        },
        "specrouter_model_quarantines": counted(state.quarantines),
        "specrouter_model_quarantined": {
            (name,): float(name in state.quarantined) for name in names
        },
    }


def estimate_values(known: PerformanceSnapshot) -> Named:
    shown = nlargest(_TREES, known.trees.items(), key=lambda each: each[1].trials)
    trees = {
        (_joined(proposers), verifier, _flag(sampled)): tree
        for (proposers, verifier, sampled), tree in shown
    }
    return {
        "specrouter_similarity_ratio": {
            (drafter, verifier): score for (drafter, verifier), score in known.similarity.items()
        },
        "specrouter_predicted_acceptance_ratio": {
            (drafter, verifier, _flag(sampled)): alpha
            for (drafter, verifier, sampled), alpha in known.promised_alpha.items()
        },
        "specrouter_acceptance_ratio": {key: tree.alpha for key, tree in trees.items()},
        "specrouter_calibration_error_ratio": {
            key: tree.calibration.expected_error for key, tree in trees.items()
        },
        "specrouter_calibration_brier_ratio": {
            key: tree.calibration.brier for key, tree in trees.items()
        },
        "specrouter_calibration_nodes": {
            key: tree.calibration.nodes for key, tree in trees.items()
        },
    }


def vllm_values(target: str, state: EngineState, decoded: DecodeFigures) -> Named:
    values: dict[str, Value] = {
        "vllm:num_requests_running": state.running,
        "vllm:num_requests_waiting": state.waiting,
        "vllm:kv_cache_usage_perc": state.kv_reserved_tokens / state.kv_capacity_tokens,
        "vllm:prefix_cache_queries": state.cache.lookup_tokens,
        "vllm:prefix_cache_hits": state.cache.cached_tokens,
        "vllm:prompt_tokens": decoded.prompt_tokens,
        "vllm:generation_tokens": decoded.produced_tokens,
        "vllm:spec_decode_num_drafts": decoded.drafts,
        "vllm:spec_decode_num_draft_tokens": decoded.drafted_tokens,
        "vllm:spec_decode_num_accepted_tokens": decoded.accepted_tokens,
        # vLLM's later and its older name.
        "vllm:inter_token_latency_seconds": _times(decoded.between_tokens),
        "vllm:time_per_output_token_seconds": _times(decoded.between_tokens),
    }
    return {
        **{name: {(target,): value} for name, value in values.items()},
        "vllm:spec_decode_num_accepted_tokens_per_pos": {
            (target, str(position)): count for position, count in enumerate(decoded.accepted_at)
        },
    }


def _each(counts: Mapping[str, _Counts], value: Callable[[_Counts], float]) -> Values:
    return {(name,): value(one) for name, one in counts.items()}


def _times(times: TimeFigures) -> Distribution:
    return Distribution(TIME_BOUNDS_S, times.counts, times.sum_s)


def _joined(chain: Chain) -> str:
    return ">".join(chain)


def _flag(value: bool) -> str:
    return "true" if value else "false"
