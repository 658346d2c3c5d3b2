"""Routing policies: which replica serves a request.

Contract: pure: `(request, views, settings) -> Ranking`. Views are of replicas that may be chosen,
at least one, in the configuration's order. Every ranking holds the terms that decided.

To write another policy, make a `ReplicaPolicy` of such a function, and name it in a configuration:
`cluster.routing.policy: my_package.my_module:MY_POLICY`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from specrouter.cluster import flowguard
from specrouter.cluster.admission import Attainability, at_view
from specrouter.cluster.flowguard import WorkerMetrics
from specrouter.cluster.state import Ranking, ReplicaView, RoutedRequest
from specrouter.config.policies import REPLICA_POLICIES

logger = logging.getLogger(__name__)

_CLOSE = 0.1  # of an objective: predictions are not accurate enough for smaller differences

Views = Sequence[ReplicaView]
Terms = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class RoutingSettings:
    """Settings of policies; `longest_queue` is the most requests that may wait."""

    longest_queue: int


@dataclass(frozen=True)
class ReplicaPolicy:
    """A routing policy; `rank` orders the replicas, best first."""

    rank: Callable[[RoutedRequest, Views, RoutingSettings], Ranking]


def rank(policy: str, request: RoutedRequest, views: Views, settings: RoutingSettings) -> Ranking:
    """Rank by the policy of this name.

    If the policy fails, or names no replica, the request goes to the replica with the fewest
    requests.
    """
    found: ReplicaPolicy = REPLICA_POLICIES.find(policy)
    names = {view.name for view in views}
    try:
        ranking = found.rank(request, views, settings)
        if not ranking.order or not names.issuperset(ranking.order):
            raise ValueError(f"it ranked {ranking.order} of {sorted(names)}")
        return ranking
    except Exception as error:
        logger.exception("the routing policy %s has failed", policy)
        reason = f"fewest requests: {policy} has failed ({type(error).__name__}: {error})"
        return replace(_join_shortest(request, views, settings), reason=reason)


def _round_robin(request: RoutedRequest, views: Views, settings: RoutingSettings) -> Ranking:
    order = _in_turn(request.number, [view.name for view in views])
    return Ranking(order, _loads(views), "its turn", {})


def _join_shortest(request: RoutedRequest, views: Views, settings: RoutingSettings) -> Ranking:
    least = sorted(views, key=_requests)
    return Ranking(tuple(view.name for view in least), _loads(views), "fewest requests", {})


def _p2c(request: RoutedRequest, views: Views, settings: RoutingSettings) -> Ranking:
    """Rank by the power of two choices (Mitzenmacher, 2001)."""
    rest = list(views)
    drawn = [rest.pop(int(die * len(rest))) for die in request.dice[: len(rest)]]
    order = [*sorted(drawn, key=_requests), *sorted(rest, key=_requests)]
    return Ranking(tuple(view.name for view in order), _loads(views), "the better of two", {})


def _flowguard(request: RoutedRequest, views: Views, settings: RoutingSettings) -> Ranking:
    """Rank by FlowGuard's score, with requests sent since the last state included.

    Metrics that are up to 500 ms old would send every request of that time to the same replica.
    """
    workers = [
        flowguard.metrics_of(
            view.state,
            max(0, _requests(view) - view.state.rows, view.state.waiting),
            min(_requests(view), view.state.rows),
            hit_rate(request, view),
            settings.longest_queue,
        )
        for view in views
    ]
    return guarded(views, workers)


def guarded(views: Views, workers: Sequence[WorkerMetrics]) -> Ranking:
    places = flowguard.ranked(workers)
    terms = {
        view.name: {
            "C": worker.cache,
            "M": worker.memory,
            "Q": worker.queue,
            "L": worker.load,
            "S": flowguard.score(worker),
            "omega": flowguard.overload(worker),
        }
        for view, worker in zip(views, workers, strict=True)
    }
    order = tuple(views[place].name for place in places)
    all_over = min(map(flowguard.overload, workers)) > flowguard.OVERLOAD
    excluded = {
        view.name: f"overloaded: {terms[view.name]['omega']:.2f} > {flowguard.OVERLOAD:g}"
        for view in views
        if view.name not in order
    }
    reason = "all are overloaded: the shortest queue" if all_over else "the highest score"
    return Ranking(order, terms, reason, excluded)


def _slo(request: RoutedRequest, views: Views, settings: RoutingSettings) -> Ranking:
    """Rank by attainability of the objective.

    Replicas that attain the objective come first: in turn those whose slack is within `_CLOSE` of
    the largest, then the others by slack. Then come, and without an objective only these, the
    replicas by the time at which the request would be done: a late request delays others least at
    the first of them.
    """
    found = {view.name: at_view(view, unread(request, view)) for view in views}
    terms = {view.name: _terms(found[view.name], view, request) for view in views}
    first = sorted(found, key=lambda name: found[name].total_ms)
    if request.objective is None:
        return Ranking(tuple(first), terms, "done first", {})
    turn = _in_turn(request.number, list(found))
    able = [name for name in turn if found[name].attained]
    best = max((found[name].slack for name in able), default=0.0)
    able.sort(key=lambda name: min(0.0, found[name].slack - best + _CLOSE), reverse=True)
    others = [name for name in first if name not in able]
    reason = "attains the objective, in turn" if able else f"none attains it: {_whys(found)}"
    return Ranking((*able, *others), terms, reason, {}, asks=True)


def _terms(found: Attainability, view: ReplicaView, request: RoutedRequest) -> Mapping[str, float]:
    times = {"ttft_ms": found.ttft_ms, "tpot_ms": found.tpot_ms, "total_ms": found.total_ms}
    factors = {"ttft_factor": view.correction.ttft, "tpot_factor": view.correction.tpot}
    slack = {"slack": found.slack} if request.objective else {}
    return {**times, **factors, **slack}


def _whys(found: Mapping[str, Attainability]) -> str:
    return "; ".join(f"{name}: {one.why}" for name, one in found.items())


def _requests(view: ReplicaView) -> int:
    return view.state.requests + view.sent


def _loads(views: Views) -> Terms:
    return {view.name: {"requests": _requests(view)} for view in views}


def hit_rate(request: RoutedRequest, view: ReplicaView) -> float:
    return min(1.0, view.matched_tokens / max(1, request.prompt_tokens))


def unread(request: RoutedRequest, view: ReplicaView) -> RoutedRequest:
    """Return the request without the tokens that the replica's prefix cache should hold."""
    left = max(1, request.prompt_tokens - view.matched_tokens)
    return replace(request, prompt_tokens=left)


def _in_turn(number: int, names: Sequence[str]) -> tuple[str, ...]:
    first = number % len(names) if names else 0
    return (*names[first:], *names[:first])


SLO = ReplicaPolicy(_slo)
FLOWGUARD = ReplicaPolicy(_flowguard)
ROUND_ROBIN = ReplicaPolicy(_round_robin)
JOIN_SHORTEST = ReplicaPolicy(_join_shortest)
P2C = ReplicaPolicy(_p2c)
