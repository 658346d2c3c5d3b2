"""Metrics under vLLM's names, which dashboards and load balancers know."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from specrouter.engine.decode_counts import DecodeFigures
from specrouter.engine.engine_state import EngineState
from specrouter.http.prometheus_families import by_position, counter, gauge, histogram


def vllm_metrics(target: str, state: EngineState, decoded: DecodeFigures) -> Iterator[Metric]:
    name, model = ("model_name",), (target,)
    used = state.kv_reserved_tokens / state.kv_capacity_tokens
    yield gauge("vllm:num_requests_running", "Running requests.", {model: state.running}, name)
    yield gauge("vllm:num_requests_waiting", "Waiting requests.", {model: state.waiting}, name)
    yield gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache that is reserved, 1 is all.",
        {model: used},
        name,
    )
    yield counter(
        "vllm:prefix_cache_queries",
        "Prompt tokens that were looked up.",
        {model: state.cache.lookup_tokens},
        name,
    )
    yield counter(
        "vllm:prefix_cache_hits",
        "Prompt tokens that were found.",
        {model: state.cache.cached_tokens},
        name,
    )
    yield counter("vllm:prompt_tokens", "Prompt tokens.", {model: decoded.prompt_tokens}, name)
    yield counter(
        "vllm:generation_tokens", "Generated tokens.", {model: decoded.produced_tokens}, name
    )
    yield from _drafts(target, decoded)
    for family in ("inter_token_latency", "time_per_output_token"):  # its later and its old name
        yield histogram(
            f"vllm:{family}_seconds",
            "Inter-token latency; tokens of one cycle share its time evenly.",
            decoded.between_tokens,
            name,
            model,
        )


def _drafts(target: str, decoded: DecodeFigures) -> Iterator[Metric]:
    name, model = ("model_name",), (target,)
    yield counter("vllm:spec_decode_num_drafts", "Verified drafts.", {model: decoded.drafts}, name)
    yield counter(
        "vllm:spec_decode_num_draft_tokens",
        "Verified draft tokens.",
        {model: decoded.drafted_tokens},
        name,
    )
    yield counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Accepted draft tokens.",
        {model: decoded.accepted_tokens},
        name,
    )
    yield counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens by position in the draft.",
        {(target, *position): count for position, count in by_position(decoded).items()},
        ("model_name", "position"),
    )
