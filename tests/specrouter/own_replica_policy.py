"""Replica policies of one's own."""

from specrouter.cluster.policy import ReplicaPolicy, RoutingSettings, Views
from specrouter.cluster.state import Ranking, RoutedRequest


def _last(request: RoutedRequest, views: Views, settings: RoutingSettings) -> Ranking:
    order = tuple(view.name for view in reversed(views))
    return Ranking(order, {name: {} for name in order}, "the last one first", {})


LAST = ReplicaPolicy(_last)


def _failing(request: RoutedRequest, views: Views, settings: RoutingSettings) -> Ranking:
    raise ZeroDivisionError("no weights")


def _elsewhere(request: RoutedRequest, views: Views, settings: RoutingSettings) -> Ranking:
    return Ranking(("nowhere",), {}, "it is quiet there", {})


FAILING, ELSEWHERE = ReplicaPolicy(_failing), ReplicaPolicy(_elsewhere)
