"""SimulatedFleet: what a router knows of simulated replicas, and when it was told."""

from collections.abc import Collection
from dataclasses import dataclass, field

from specrouter.cluster.correction import Expected
from specrouter.cluster.roster import KnownReplica, Roster
from specrouter.cluster.state import ReplicaState


@dataclass(eq=False)
class _Sent:
    prompt_tokens: int
    is_counted: bool = False


@dataclass(eq=False, kw_only=True)
class _Member(KnownReplica):
    """`sent`: requests on their way, by number, which its state does not count."""

    sent: dict[int, _Sent] = field(default_factory=dict)

    @property
    def on_their_way(self) -> Collection[_Sent]:
        return self.sent.values()


class SimulatedFleet(Roster[_Member]):
    """Args: `names`: of the replicas, in their order. `stale_s`: see `RoutingConfig`."""

    def __init__(self, names: tuple[str, ...], stale_s: float) -> None:
        super().__init__((_Member(name=name) for name in names), stale_s)
        self.ages_s: list[float] = []  # of states, whenever one was used

    def tell(self, name: str, state: ReplicaState, now_s: float) -> None:
        """News of its own: from now on it is chosen."""
        member = self.members[name]
        member.tell(state, now_s)
        member.standing = "ready"

    def learn(
        self, name: str, expected: Expected, ttft_ms: float | None, tpot_ms: float | None
    ) -> None:
        """From what came of an attempt there."""
        member = self.members[name]
        member.experience = member.experience.after(expected, ttft_ms, tpot_ms)

    def lose(self, name: str) -> None:
        """It is not chosen before it tells something again."""
        self.members[name].standing = "lost"
        for listener in self._when_lost:
            listener(name)

    def send(self, name: str, request: int, prompt_tokens: int) -> None:
        self.members[name].sent[request] = _Sent(prompt_tokens)

    def counted(self, name: str, request: int) -> None:
        """It is in the replica's state from now on, or will never be."""
        self.members[name].sent.pop(request, None)

    def note_ages(self, now_s: float) -> None:
        """Of the states that are used now."""
        ready = {view.name for view in self._views(now_s)}
        self.ages_s += [now_s - self.members[name].told_s for name in sorted(ready)]
