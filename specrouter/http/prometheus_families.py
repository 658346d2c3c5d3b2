"""Families of Prometheus metrics from plain values by label."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from specrouter.engine.decode_counts import TIME_BOUNDS_S, DecodeFigures, TimeFigures
from specrouter.request.params import Chain

Labels = tuple[str, ...]
Values = Mapping[Labels, float] | float


def counter(name: str, documentation: str, values: Values, labels: Sequence[str] = ()) -> Metric:
    """`name` is without the ending `_total`, which the format adds."""
    return _filled(CounterMetricFamily(name, documentation, labels=labels), values)


def gauge(name: str, documentation: str, values: Values, labels: Sequence[str] = ()) -> Metric:
    return _filled(GaugeMetricFamily(name, documentation, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
        family.add_metric(labels, value)
    return family


def histogram(
    name: str,
    documentation: str,
    times: TimeFigures,
    labels: Sequence[str] = (),
    values: Sequence[str] = (),
) -> Metric:
    family = HistogramMetricFamily(name, documentation, labels=labels)
    family.add_metric(values, buckets(TIME_BOUNDS_S, times.counts), times.sum_s)
    return family


def buckets(bounds: Iterable[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """`counts`: how many values did not exceed each bound, and all of them."""
    names = (*map(floatToGoString, bounds), "+Inf")
    return list(zip(names, counts, strict=True))


def joined(chain: Chain) -> str:
    return ">".join(chain)


def by_position(decoded: DecodeFigures) -> dict[Labels, float]:
    return {(str(position),): count for position, count in enumerate(decoded.accepted_at)}
