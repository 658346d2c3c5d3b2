"""Clusters of figures: what replicas there are, and what is told of how they were routed to."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

from research.sim.cluster.cluster import ClusterSettings, MakeReplica, SimulatedCluster
from research.sim.cluster.failures import Failure, drawn_failures
from research.sim.cluster.pair import SimulatedPair
from research.sim.cluster.refusals import told_and_true
from research.sim.cluster.replica import SimulatedReplica
from research.sim.service import SimulatedService
from specrouter.bench.replay import ReplayOutcome, figures
from specrouter.config import RoutingConfig

_REFUSALS = ("refused", "no replica is ready")  # 503
_DOWN_S = 12.0  # until another process serves in a dead one's place (9 to 12 s were measured)


@dataclass(frozen=True, kw_only=True)
class ClusterKind:
    """Attributes:
    name: in figures where several kinds stand beside each other.
    slow: times as long the last of every `slow_of` replicas takes.
    kv_ms_per_token: of a prompt's keys and values from one half of a pair to the other; None:
        replicas are whole.
    mean_up_s: of each replica, between failures; None: none fails.
    max_waiting, rejects: see `ClusterSettings`.
    """

    name: str = ""
    slow: float = 1.0
    slow_of: int = 2
    kv_ms_per_token: float | None = None
    mean_up_s: float | None = None
    max_waiting: int | None = None
    rejects: bool = False

    def cluster(
        self,
        policy: str,
        replicas: int,
        make: Callable[[float], SimulatedService],
        seed: int,
        until_s: float,
    ) -> SimulatedCluster:
        """`make`: a service on a machine so many times as slow. `until_s`: failures are drawn."""
        failures: tuple[Failure, ...] = ()
        if self.mean_up_s is not None:
            failures = drawn_failures(replicas, until_s, self.mean_up_s, _DOWN_S, seed)
        settings = ClusterSettings(
            routing=RoutingConfig(policy=policy),
            failures=failures,
            max_waiting=self.max_waiting,
            rejects=self.rejects,
        )
        makes = {f"r{at}": self._make(at, make) for at in range(replicas)}
        return SimulatedCluster(makes, settings)

    def _make(self, at: int, make: Callable[[float], SimulatedService]) -> MakeReplica:
        is_slow = at % self.slow_of == self.slow_of - 1
        one = partial(make, self.slow if is_slow else 1.0)
        kv_ms = self.kv_ms_per_token
        if kv_ms is None:
            return lambda: SimulatedReplica(one())
        return lambda: SimulatedPair(
            prefill=SimulatedReplica(one()), decode=SimulatedReplica(one()), kv_ms_per_token=kv_ms
        )


WHOLE = ClusterKind()


def routing_of(cluster: SimulatedCluster, outcomes: Sequence[ReplayOutcome]) -> dict[str, Any]:
    """How evenly requests were spread, and what became of them.

    `crowding`: of the requests of half a second, the largest share that went to one replica, over
    the least that it can be; the mean over half seconds.
    """
    served = [one for one in outcomes if one.answer.error is None]
    ages_s = sorted(cluster.fleet.ages_s)
    return {
        "crowding": _crowding(cluster),
        "moves": sum(job.moves for job in cluster.jobs),
        "lost": sum(job.error not in (None, *_REFUSALS) for job in cluster.jobs),
        "refused": sum(job.error in _REFUSALS for job in cluster.jobs),
        "latency_s": fmean(one.answer.e2e_ms or 0.0 for one in served) / 1000 if served else None,
        "state_age_p99_s": ages_s[int(0.99 * len(ages_s))],
        "tokens_per_s": figures(outcomes)["tokens_per_s"],
    }


def _crowding(cluster: SimulatedCluster, window_s: float = 0.5) -> float:
    windows: dict[int, Counter[str]] = {}
    for job in cluster.jobs:
        if job.first_place is not None:
            windows.setdefault(int(job.sent_s / window_s), Counter())[job.first_place] += 1
    replicas = len(cluster.service().rows_given_s)
    shares = [max(each.values()) / -(-each.total() // replicas) for each in windows.values()]
    return fmean(shares) if shares else 0.0


def overload_of(
    usual: Sequence[ReplayOutcome], outcomes: Sequence[ReplayOutcome], cluster: SimulatedCluster
) -> dict[str, Any]:
    """Under overload, beside the same requests at a usual rate.

    `goodput`: requests in time per second of arrivals, over the usual ones'. `retry_ratio`: of the
    refusals, what callers were told to wait over how long it really took until a request that came
    with theirs could have been taken; median, and the share within a factor of 2.
    """
    waits = told_and_true(cluster.refusals, cluster.service())
    ratios = [told / true for told, true in waits]
    within = [0.5 <= one <= 2.0 for one in ratios]
    return {
        "goodput_ratio": _goodput(outcomes) / _goodput(usual),
        "refused": len(cluster.refusals) / len(outcomes),
        "retry_ratio": median(ratios) if ratios else None,
        "retry_within_2": fmean(within) if within else None,
    }


def _goodput(outcomes: Sequence[ReplayOutcome]) -> float:
    span_s = outcomes[-1].sent_s - outcomes[0].sent_s
    return sum(one.is_attained is True for one in outcomes) / span_s
