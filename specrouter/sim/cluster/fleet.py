"""SimulatedFleet: what a router knows of simulated replicas, and when it was told.

As `specrouter.cluster.fleet.Fleet` has it, on a clock that comes in.
"""

from dataclasses import dataclass, field

from specrouter.cluster.state import ReplicaState, ReplicaView


@dataclass(eq=False)
class _Member:
    """`uncounted`: prompt tokens of the requests on their way, which its state does not count;
    `left`: requests that it counts and that have left since, their objectives in danger."""

    state: ReplicaState | None = None
    told: ReplicaState | None = None
    told_s: float = 0.0
    heard_s: float = 0.0
    is_ready: bool = False
    left: int = 0
    uncounted: dict[int, int] = field(default_factory=dict)


class SimulatedFleet:
    """Args: `names`: of the replicas, in their order. `stale_s`: see `RoutingConfig`."""

    def __init__(self, names: tuple[str, ...], stale_s: float) -> None:
        self._members = {name: _Member() for name in names}
        self._stale_s = stale_s
        self.ages_s: list[float] = []  # of states, whenever one was used

    def tell(self, name: str, state: ReplicaState, now_s: float) -> None:
        """News of its own: from now on it is chosen."""
        member = self._members[name]
        member.state = member.told = state
        member.told_s = member.heard_s = now_s
        member.is_ready, member.left = True, 0

    def note(self, name: str, state: ReplicaState, now_s: float) -> None:
        """What an answer of its brings along."""
        member = self._members[name]
        member.state, member.heard_s, member.left = state, now_s, 0

    def leave(self, name: str) -> None:
        self._members[name].left += 1

    def left(self, name: str) -> int:
        return self._members[name].left

    def told_s(self, name: str) -> float:
        """When it last told something by itself."""
        return self._members[name].told_s

    def lose(self, name: str) -> None:
        """It is not chosen before it tells something again."""
        self._members[name].is_ready = False

    def send(self, name: str, request: int, prompt_tokens: int) -> None:
        self._members[name].uncounted[request] = prompt_tokens

    def counted(self, name: str, request: int) -> None:
        """It is in the replica's state from now on, or will never be."""
        self._members[name].uncounted.pop(request, None)

    def ready(self, now_s: float) -> list[ReplicaView]:
        """That may be chosen, in their order."""
        views = (self._view(name, member, now_s) for name, member in self._members.items())
        return [view for view in views if view is not None]

    def _view(self, name: str, member: _Member, now_s: float) -> ReplicaView | None:
        state, told = member.state, member.told
        is_stale = now_s - member.told_s > self._stale_s
        if not member.is_ready or is_stale or state is None or told is None:
            return None
        sent = member.uncounted.values()
        age_s = now_s - member.heard_s
        self.ages_s.append(now_s - member.told_s)
        return ReplicaView(name, state, told, age_s, len(sent), sum(sent))
