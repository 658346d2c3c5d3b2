"""The table of metrics that a scrape reads from the router: type, name, labels and help of each.

Contract: `families` writes exactly these, in this order. Names of counters are without the ending
`_total`, which the format adds. `docs/metrics.md` describes every family.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from re import MULTILINE, findall

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

_TABLE = """
gauge specrouter_requests_running: Requests that are being decoded.
gauge specrouter_requests_waiting: Requests that wait to be admitted.
gauge specrouter_request_rows: Largest number of requests that can run together.
counter specrouter_prompt_tokens: Prompt tokens of admitted requests.
counter specrouter_generated_tokens: Tokens of all outputs.
gauge specrouter_kv_reserved_tokens: KV cache tokens reserved by running requests.
gauge specrouter_kv_capacity_tokens: KV cache tokens that all requests may reserve together.
counter specrouter_slo_admitted_requests{slo_class}: Requests admitted with an objective.
counter specrouter_slo_best_effort_requests{slo_class}: Requests admitted without an objective, or
    without a promise to attain it.
counter specrouter_slo_declined_requests{slo_class}: Requests whose objective admission found to be
    unattainable.
counter specrouter_slo_rejected_requests{slo_class}: Declined requests that asked to be rejected,
    and were.
counter specrouter_slo_preemptions{slo_class}: Times that a running request had to give its row
    back.
counter specrouter_slo_judged_requests{slo_class}: Finished requests that had an objective.
counter specrouter_slo_attained_requests{slo_class}: Requests that attained their objective.
counter specrouter_slo_missed_requests{slo_class}: Requests that missed their objective.
counter specrouter_slo_implied_ttft_requests{slo_class}: Requests with a first token, and with a
    TTFT that was implied, not stated.
counter specrouter_slo_implied_ttft_kept_requests{slo_class}: Requests whose first token came by the
    implied TTFT.
counter specrouter_slo_tokens{slo_class}: Output tokens of finished requests.
counter specrouter_goodput_tokens{slo_class}: Output tokens of requests that attained their
    objective.
counter specrouter_slo_attained_stages{slo_class, stage}: Stages of outputs that kept their TPOT, by
    place.
counter specrouter_slo_missed_stages{slo_class, stage}: Stages of outputs that missed their TPOT, by
    place.
gauge specrouter_slo_pace_margin_ratio: Share of every TPOT objective that admission keeps back.
counter specrouter_model_forwards{model}: Forward passes of a model.
counter specrouter_model_tokens{model}: Input tokens of a model's forward passes.
counter specrouter_model_seconds{model}: Time spent in a model's forward passes.
gauge specrouter_model_predicted_seconds{model, tokens}: T(n): predicted duration of a forward pass
    over n tokens.
gauge specrouter_model_loaded{model}: 1 if a model is loaded.
gauge specrouter_model_memory_bytes{model, kind}: Memory of a model's weights and of its KV cache.
counter specrouter_model_quarantines{model}: Failures after which a model was not used for a while.
gauge specrouter_model_quarantined{model}: 1 while a model is not used after a failure.
gauge specrouter_similarity_ratio{drafter, verifier}: SimScore: 1 - total variation distance of two
    models' distributions.
gauge specrouter_predicted_acceptance_ratio{drafter, verifier, sampled}: Acceptance rate predicted
    from the similarity, f(SimScore).
gauge specrouter_acceptance_ratio{proposers, verifier, sampled}: Acceptance rate of the most likely
    child of an accepted node.
gauge specrouter_calibration_error_ratio{proposers, verifier, sampled}: Expected calibration error
    (ECE) of predicted acceptance.
gauge specrouter_calibration_brier_ratio{proposers, verifier, sampled}: Brier score (mean squared
    error) of predicted acceptance.
gauge specrouter_calibration_nodes{proposers, verifier, sampled}: Nodes behind both errors, older
    ones with lower weight.
counter specrouter_chain_cycles{chain}: Decoding cycles by chain, counted once for each request.
counter specrouter_chain_tokens{chain}: Output tokens by chain.
counter specrouter_chain_switches: Changes of the chain or of the draft tree's shape.
counter specrouter_shadow_evaluations: Evaluations of idle drafters on committed text.
counter specrouter_exploration_seconds: Time that these evaluations cost.
counter specrouter_target_passes: Verifications by the target, counted once for each request.
counter specrouter_drafts: Verifications with at least one draft token.
counter specrouter_draft_tokens: Draft tokens that the target verified.
counter specrouter_accepted_tokens: Draft tokens that the target accepted.
counter specrouter_accepted_tokens_per_position{position}: Accepted draft tokens by position in the
    draft.
counter specrouter_budget_tokens: Token budget of cycles that verify a selection of the drafted
    nodes.
counter specrouter_budgeted_draft_tokens: Draft tokens that the target verified in these cycles.
histogram specrouter_cycle_seconds: Duration of a cycle.
histogram specrouter_inter_token_seconds: Inter-token latency; tokens of one cycle share its time
    evenly.
counter specrouter_logits_seconds: Time spent on logits, sampling and selection of draft tokens.
counter specrouter_control_plane_seconds: Time of cycles spent outside of forward passes and logits.
gauge specrouter_control_plane_ratio: Share of the control plane in the duration of all cycles.
gauge specrouter_machine_slowdown_ratio: Current slowdown of forward passes against the profile at
    load.
counter specrouter_prefix_cache_lookups: Admitted requests whose prompts were looked up in the
    prefix cache.
counter specrouter_prefix_cache_hits: Those of them that found something.
counter specrouter_prefix_cache_lookup_tokens: Their prompt tokens.
counter specrouter_prefix_cache_hit_tokens: Those of these tokens that were not read again.
counter specrouter_prefix_cache_evictions: Cached prefixes that were dropped for memory.
counter specrouter_prefix_cache_failures: Copies of cached prefixes that failed.
counter specrouter_kv_imported_tokens: Tokens whose keys and values another replica had read.
gauge specrouter_kv_cached_tokens: KV cache tokens that hold prefixes of requests that have ended.
counter specrouter_restarts: Restarts of the engine after a failure.
counter specrouter_control_faults{part}: Failures of parts of the control plane, without which
    requests went on.
gauge vllm:num_requests_running{model_name}: Running requests.
gauge vllm:num_requests_waiting{model_name}: Waiting requests.
gauge vllm:kv_cache_usage_perc{model_name}: Share of the KV cache that is reserved, 1 is all.
counter vllm:prefix_cache_queries{model_name}: Prompt tokens that were looked up.
counter vllm:prefix_cache_hits{model_name}: Prompt tokens that were found.
counter vllm:prompt_tokens{model_name}: Prompt tokens.
counter vllm:generation_tokens{model_name}: Generated tokens.
counter vllm:spec_decode_num_drafts{model_name}: Verified drafts.
counter vllm:spec_decode_num_draft_tokens{model_name}: Verified draft tokens.
counter vllm:spec_decode_num_accepted_tokens{model_name}: Accepted draft tokens.
counter vllm:spec_decode_num_accepted_tokens_per_pos{model_name, position}: Accepted draft tokens by
    position in the draft.
histogram vllm:inter_token_latency_seconds{model_name}: Inter-token latency; tokens of one cycle
    share its time evenly.
histogram vllm:time_per_output_token_seconds{model_name}: Inter-token latency; tokens of one cycle
    share its time evenly.
"""


@dataclass(frozen=True)
class Distribution:
    """`counts`: how many values did not exceed each of `bounds`, and all of them."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float


Value = float | Distribution
Values = Value | Mapping[tuple[str, ...], Value]  # by the values of the labels, in their order


def families(values: Mapping[str, Values]) -> Iterator[Metric]:
    """`values`: by name, of every family of the table."""
    for kind, name, labels, text in _ROWS:
        found = values[name]
        family = _KINDS[kind](name, text, labels=labels)
        for key, value in (found if isinstance(found, Mapping) else {(): found}).items():
            _add(family, key, value)
        yield family


def _add(family: Metric, labels: tuple[str, ...], value: Value) -> None:
    if isinstance(value, Distribution):
        assert isinstance(family, HistogramMetricFamily)
        bounds = (*map(floatToGoString, value.bounds), "+Inf")
        buckets = list(zip(bounds, value.counts, strict=True))
        family.add_metric(labels, buckets, value.sum)
    else:
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(labels, value)


_KINDS = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_ROWS = [
    (kind, name, findall(r"\w+", labels), " ".join(text.split()))
    for kind, name, labels, text in findall(
        r"^(\w+) ([\w:]+)({.*})?: (.*(?:\n    .*)*)", _TABLE, MULTILINE
    )
]
