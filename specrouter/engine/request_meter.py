"""Prometheus counts and histograms of requests, recorded when they end.

Contract: every request that ends is recorded once, which takes some microseconds. Thread-safe.
Times are in seconds, the unit of Prometheus.

Not here: the totals of decoding (`DecodeCounts`) and attainment (`SloAccounts`), which
`RouterCollector` reads at the scrape.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric

from specrouter.engine.slo_accounts import class_of
from specrouter.request.objective import BY_VALUE, NO_OBJECTIVE
from specrouter.request.output import FinishReason, RequestOutput

_TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5),
)
_REQUEST_BOUNDS_S = (
    *(0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5),
    *(5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 300.0, 600.0),
)
# Names, descriptions and bounds of TTFT, TPOT and end-to-end latency; then vLLM's names for them.
_TIMES = (
    (
        "time_to_first_token_seconds",
        "Time from submission to the first token.",
        _REQUEST_BOUNDS_S,
    ),
    (
        "time_per_output_token_seconds",
        "Mean time of an output token after the first, by request.",
        _TOKEN_BOUNDS_S,
    ),
    ("request_seconds", "Time from submission to the end.", _REQUEST_BOUNDS_S),
)
_VLLM_TIMES = (
    "time_to_first_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
)
# vLLM's names of finish reasons.
_VLLM_REASONS: dict[FinishReason, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "error": "error",
    "cancelled": "abort",
    "timeout": "abort",
    "engine_dead": "error",
}
_REJECTED = "unattainable"  # finish reason of rejected requests; vLLM has none for them


class RequestMeter:
    """Metrics of ended requests, under this program's names and under vLLM's.

    Args:
        model: the target's name, the label of vLLM's metrics.
        slo_classes: the configuration's classes; their series exist before a request ends.
    """

    def __init__(self, model: str, slo_classes: Iterable[str] = ()) -> None:
        registry = self._registry = CollectorRegistry()
        self._ended = Counter(
            "specrouter_requests", "Finished requests.", ["finish_reason"], registry=registry
        )
        self._ttft_s, self._tpot_s, self._request_s = (
            self._histogram(f"specrouter_{name}", described, ["slo_class"], bounds)
            for name, described, bounds in _TIMES
        )
        vllm_ended = Counter(
            "vllm:request_success",
            "Finished requests.",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self._vllm_ended = {
            reason: vllm_ended.labels(model, name) for reason, name in _VLLM_REASONS.items()
        }
        self._vllm_ttft_s, self._vllm_tpot_s, self._vllm_request_s = (
            self._histogram(f"vllm:{name}", described, ["model_name"], bounds).labels(model)
            for name, (_, described, bounds) in zip(_VLLM_TIMES, _TIMES, strict=True)
        )
        self._show_at_zero(slo_classes)

    def record(self, output: RequestOutput, elapsed_s: float) -> None:
        """Record a request that ended `elapsed_s` after its submission."""
        metrics, slo_class = output.metrics, class_of(output.metrics)
        is_rejected = output.error_field == _REJECTED
        self._ended.labels(_REJECTED if is_rejected else output.finish_reason).inc()
        self._vllm_ended["cancelled" if is_rejected else output.finish_reason].inc()
        self._request_s.labels(slo_class).observe(elapsed_s)
        self._vllm_request_s.observe(elapsed_s)
        if metrics.ttft_ms is not None:
            self._ttft_s.labels(slo_class).observe(metrics.ttft_ms / 1000)
            self._vllm_ttft_s.observe(metrics.ttft_ms / 1000)
        if metrics.tpot_ms is not None:
            self._tpot_s.labels(slo_class).observe(metrics.tpot_ms / 1000)
            self._vllm_tpot_s.observe(metrics.tpot_ms / 1000)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, without the times at which series were created."""
        yield from map(without_created, self._registry.collect())

    def _histogram(
        self, name: str, described: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> Histogram:
        return Histogram(name, described, labels, registry=self._registry, buckets=bounds)

    def _show_at_zero(self, slo_classes: Iterable[str]) -> None:
        """Create series at 0, so that the first request of a kind shows as an increase."""
        for reason in (*get_args(FinishReason), _REJECTED):
            self._ended.labels(reason)
        for name in (*slo_classes, BY_VALUE, NO_OBJECTIVE):
            for times in (self._ttft_s, self._tpot_s, self._request_s):
                times.labels(name)


def without_created(family: Metric) -> Metric:
    """Remove the unused `_created` samples that the Prometheus client adds to each series."""
    family.samples = [each for each in family.samples if not each.name.endswith("_created")]
    return family
