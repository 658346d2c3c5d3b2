"""Metrics of each replica, in Prometheus' form. Their sums stand under the engine's own names."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from specrouter.cluster.fleet import Member
from specrouter.cluster.state import ReplicaState

_NAME = ("replica",)


def replica_metrics(members: Iterable[Member]) -> Iterator[Metric]:
    every = list(members)
    up = GaugeMetricFamily("specrouter_replica_up", "1 if a replica takes requests.", labels=_NAME)
    age = GaugeMetricFamily(
        "specrouter_replica_state_age_seconds", "Since a replica told its state.", labels=_NAME
    )
    for member in every:
        up.add_metric((member.name,), float(member.standing == "ready"))
        if member.told is not None:
            age.add_metric((member.name,), time.monotonic() - member.told_s)
    yield from (up, age)
    yield from _states(every)
    yield from _counts(every)


def _states(members: list[Member]) -> Iterator[Metric]:
    def gauge(name: str, text: str, value: Callable[[ReplicaState], float]) -> Metric:
        family = GaugeMetricFamily(f"specrouter_replica_{name}", text, labels=_NAME)
        for member in members:
            if member.state is not None and member.standing == "ready":
                family.add_metric((member.name,), value(member.state))
        return family

    yield gauge("requests_running", "Requests that are being decoded.", lambda one: one.running)
    yield gauge("requests_waiting", "Requests that wait to be admitted.", lambda one: one.waiting)
    yield gauge("request_rows", "Requests that can run together.", lambda one: one.rows)
    yield gauge("kv_usage_ratio", "Share of KV memory that is reserved.", lambda one: one.kv_share)


def _counts(members: list[Member]) -> Iterator[Metric]:
    attempts = CounterMetricFamily(
        "specrouter_replica_attempts", "Times that a sample was sent there.", labels=_NAME
    )
    declined = CounterMetricFamily(
        "specrouter_replica_declined", "Of them, times that it declined.", labels=_NAME
    )
    moves = CounterMetricFamily(
        "specrouter_replica_moves",
        "Of them, times that the sample went on elsewhere, by cause.",
        labels=(*_NAME, "cause"),
    )
    for member in members:
        attempts.add_metric((member.name,), member.attempts)
        declined.add_metric((member.name,), member.declined)
        for cause, count in member.moves.items():
            moves.add_metric((member.name, cause), count)
    yield from (attempts, declined, moves)
