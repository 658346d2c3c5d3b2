"""SimulatedFleet: what a router knows of simulated replicas, and when it was told."""

from specrouter.cluster.correction import Expected
from specrouter.cluster.roster import KnownReplica, Roster
from specrouter.cluster.state import ReplicaState


class SimulatedFleet(Roster[KnownReplica]):
    """Args: `names`: of the replicas, in their order."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(KnownReplica(name=name) for name in names)
        self.ages_s: list[float] = []  # of states, whenever one was used

    def tell(self, name: str, state: ReplicaState, now_s: float) -> None:
        """News of its own: from now on it is chosen."""
        member = self.members[name]
        member.note_state(state, now_s)
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

    def send(self, name: str, request: int, prompt_tokens: int) -> None:
        self.members[name].uncounted[request] = prompt_tokens

    def counted(self, name: str, request: int) -> None:
        """It is in the replica's state from now on, or will never be."""
        self.members[name].uncounted.pop(request, None)

    def note_ages(self, now_s: float) -> None:
        """Of the states that are used now."""
        ready = sorted(view.name for view in self.ready(now_s))
        self.ages_s += [now_s - self.members[name].reported_s for name in ready]
