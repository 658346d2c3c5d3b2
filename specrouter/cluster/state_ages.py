"""StateAges: how old the states of replicas were when requests were routed by them."""

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client.metrics_core import HistogramMetricFamily, Metric

# Among them `metrics_s` and `stale_s` by default, and the aim for 99%: 0.6.
BOUNDS_S = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5)


class StateAges:
    """Of every replica at every decision. Told by one thread; may be asked from any."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def note(self, ages_s: Iterable[float]) -> None:
        for age_s in ages_s:
            self._counts[bisect_left(BOUNDS_S, age_s)] += 1
            self._sum_s += age_s

    def share_within(self, bound_s: float) -> float:
        """Of all, at most one of `BOUNDS_S` old; 1 where there were none."""
        within = self._counts[: BOUNDS_S.index(bound_s) + 1]
        return sum(within) / sum(self._counts) if any(self._counts) else 1.0

    def metric(self) -> Metric:
        family = HistogramMetricFamily(
            "specrouter_replica_state_age_at_use_seconds",
            "How old what a replica had told was, when a request was routed by it.",
        )
        counts = list(self._counts)
        total, buckets = 0, []
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric((), buckets, self._sum_s)
        return family
