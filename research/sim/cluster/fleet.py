"""SimulatedFleet: what a router knows of simulated replicas, and when it was told.

As `specrouter.cluster.fleet.Fleet` has it, on a clock that comes in.
"""

from dataclasses import dataclass, field, replace

from specrouter.cluster.correction import Correction, Experience, Measured, corrections
from specrouter.cluster.state import ReplicaState, ReplicaView


@dataclass(eq=False)
class _Member:
    """`uncounted`: prompt tokens of the requests on their way, which its state does not count."""

    state: ReplicaState | None = None
    told: ReplicaState | None = None
    told_s: float = 0.0
    heard_s: float = 0.0
    is_ready: bool = False
    experience: Experience = field(default_factory=Experience)
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
        member.is_ready = True

    def note(self, name: str, state: ReplicaState, now_s: float) -> None:
        """What an answer of its brings along."""
        member = self._members[name]
        member.state, member.heard_s = state, now_s

    def told_s(self, name: str) -> float:
        """When it last told something by itself."""
        return self._members[name].told_s

    def learn(self, name: str, one: Measured) -> None:
        """From what came of an attempt there."""
        member = self._members[name]
        member.experience = member.experience.after(one)

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
        names = [name for name, member in self._members.items() if self._is_ready(member, now_s)]
        self.ages_s += [now_s - self._members[name].told_s for name in names]
        known = corrections({name: self._members[name].experience for name in names})
        return [self._view(name, known[name], now_s) for name in names]

    def _is_ready(self, member: _Member, now_s: float) -> bool:
        is_fresh = now_s - member.told_s <= self._stale_s
        return member.is_ready and is_fresh and member.state is not None

    def _view(self, name: str, correction: Correction, now_s: float) -> ReplicaView:
        member = self._members[name]
        assert member.state is not None, "it has told one"
        assert member.told is not None, "it has told one"
        sent, age_s = member.uncounted.values(), now_s - member.heard_s
        known = ReplicaView(name, member.state, member.told, age_s, len(sent), sum(sent))
        return replace(known, correction=correction)
