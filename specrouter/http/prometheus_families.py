"""Families of Prometheus metrics from plain values by label."""

from collections.abc import Mapping, Sequence

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
    bounds = (*map(floatToGoString, TIME_BOUNDS_S), "+Inf")
    family.add_metric(values, list(zip(bounds, times.counts, strict=True)), times.sum_s)
    return family


def joined(chain: Chain) -> str:
    return ">".join(chain)


def by_position(decoded: DecodeFigures) -> dict[Labels, float]:
    return {(str(position),): count for position, count in enumerate(decoded.accepted_at)}
