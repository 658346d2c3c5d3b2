"""Hand-over: which replica takes a request, by whether it can attain the request's objective there.

Requests go to replicas in turn; one that cannot attain a request's objective beside what it has
admitted hands it to the next, up to a number of hops. Then the request is best effort at the first,
or declined. Load is balanced by attainability, not measured.
Pure. Source: SLOs-Serve (arXiv 2504.08784), section 4.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specrouter.view import EngineView, RequestView

# Would this replica admit the request, with all that it admitted, in time?
Attainable = Callable[[EngineView, RequestView], bool]


@dataclass(frozen=True)
class HandOver:
    """`replica` None: declined. `hops`: replicas that could not attain the objective."""

    replica: int | None
    hops: int
    is_best_effort: bool = False


def hand_over(
    request: RequestView,
    replicas: Sequence[EngineView],
    first: int,
    attainable: Attainable,
    most_hops: int,
    backup: Literal["best_effort", "decline"] = "best_effort",
) -> HandOver:
    """Args:
    first: whose turn it is, of the round robin.
    most_hops: hand-overs at most; every replica is asked once at most.
    """
    asked = min(most_hops + 1, len(replicas))
    for hops in range(asked):
        place = (first + hops) % len(replicas)
        if attainable(replicas[place], request):
            return HandOver(place, hops)
    if backup == "decline":
        return HandOver(None, asked)
    return HandOver(first % len(replicas), asked, is_best_effort=True)


def after_arrival(view: EngineView, request: RequestView) -> EngineView:
    """The view of a replica that was handed a request."""
    return replace(view, waiting=(*view.waiting, request))
