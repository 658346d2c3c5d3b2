"""Metrics of objectives: what admission decided about them, and which were attained, by class."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from specrouter.engine.slo_accounts import (
    SLACK_BOUNDS,
    AdmissionCounts,
    SlackFigures,
    SloAccounts,
    SloCounts,
)
from specrouter.http.prometheus_families import Values, buckets, counter
from specrouter.request.objective import BY_VALUE, NO_OBJECTIVE

_Counts = TypeVar("_Counts")
_CLASS = ("slo_class",)


def objective_metrics(accounts: SloAccounts, configured: Iterable[str]) -> Iterator[Metric]:
    """`configured`: classes, which show up before their first request, so that it is an
    increase."""
    classes = (*configured, BY_VALUE, NO_OBJECTIVE)
    yield from _admission({**dict.fromkeys(classes, AdmissionCounts()), **accounts.admissions()})
    yield _slack(accounts.slack())
    yield from _attainment({**dict.fromkeys(classes, SloCounts()), **accounts.counts()})
    yield from _stages(accounts.stages())


def _admission(counts: Mapping[str, AdmissionCounts]) -> Iterator[Metric]:
    yield _by_class(
        "specrouter_slo_admitted_requests",
        "Requests admitted with an objective.",
        counts,
        lambda each: each.admitted,
    )
    yield _by_class(
        "specrouter_slo_best_effort_requests",
        "Requests admitted without an objective, or without a promise to attain it.",
        counts,
        lambda each: each.best_effort,
    )
    yield _by_class(
        "specrouter_slo_declined_requests",
        "Requests whose objective admission found to be unattainable.",
        counts,
        lambda each: each.declined,
    )
    yield _by_class(
        "specrouter_slo_rejected_requests",
        "Declined requests that asked to be rejected, and were.",
        counts,
        lambda each: each.rejected,
    )
    yield _by_class(
        "specrouter_slo_preemptions",
        "Times that a running request had to give its row back.",
        counts,
        lambda each: each.preempted,
    )


def _slack(slack: SlackFigures) -> Metric:
    family = HistogramMetricFamily(
        "specrouter_slo_predicted_slack_ratio",
        "Share by which admitted objectives could have been tighter, as predicted at admission.",
    )
    family.add_metric((), buckets(SLACK_BOUNDS, slack.counts), slack.sum)
    return family


def _attainment(counts: Mapping[str, SloCounts]) -> Iterator[Metric]:
    yield _by_class(
        "specrouter_slo_judged_requests",
        "Finished requests that had an objective.",
        counts,
        lambda each: each.judged,
    )
    yield _by_class(
        "specrouter_slo_attained_requests",
        "Requests that attained their objective.",
        counts,
        lambda each: each.attained,
    )
    yield _by_class(
        "specrouter_slo_missed_requests",
        "Requests that missed their objective.",
        counts,
        lambda each: each.judged - each.attained,
    )
    yield _by_class(
        "specrouter_slo_tokens",
        "Output tokens of finished requests.",
        counts,
        lambda each: each.tokens,
    )
    yield _by_class(
        "specrouter_goodput_tokens",
        "Output tokens of requests that attained their objective.",
        counts,
        lambda each: each.attained_tokens,
    )


def _stages(stages: Mapping[str, tuple[tuple[int, int], ...]]) -> Iterator[Metric]:
    labels = (*_CLASS, "stage")
    counts = {
        (name, str(place)): pair for name, each in stages.items() for place, pair in enumerate(each)
    }
    yield counter(
        "specrouter_slo_attained_stages",
        "Stages of outputs that kept their TPOT, by place.",
        {key: attained for key, (_, attained) in counts.items()},
        labels,
    )
    yield counter(
        "specrouter_slo_missed_stages",
        "Stages of outputs that missed their TPOT, by place.",
        {key: judged - attained for key, (judged, attained) in counts.items()},
        labels,
    )


def _by_class(
    name: str, text: str, counts: Mapping[str, _Counts], value: Callable[[_Counts], float]
) -> Metric:
    values: Values = {(slo_class,): value(each) for slo_class, each in counts.items()}
    return counter(name, text, values, _CLASS)
