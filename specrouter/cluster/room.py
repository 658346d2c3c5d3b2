"""Room: whether a cluster takes one more request, or how soon it may be worth a try.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specrouter.cluster.state import ReplicaView


@dataclass(frozen=True)
class Crowd:
    """`waiting`: requests without a row, over all replicas. `retry_after_s`: until the first of
    the replicas would give one more request a row."""

    waiting: int
    retry_after_s: float


def crowd(views: Sequence[ReplicaView], max_waiting: int | None) -> Crowd | None:
    """None: there is room. Views are of the replicas that may be chosen, at least one. A row that
    is free anywhere is room: what waits at other replicas does not wait for it."""
    if any(view.state.requests + view.sent < view.state.rows for view in views):
        return None
    there = sum(view.state.requests + view.sent for view in views)
    waiting = there - sum(view.state.rows for view in views)
    if max_waiting is None or waiting < max_waiting:
        return None
    return Crowd(waiting, min(view.state.retry_after_s for view in views))
