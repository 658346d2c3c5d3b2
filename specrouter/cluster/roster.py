"""Roster: the replicas as a router knows them, and which of them may be chosen.

Contract: a replica whose standing is "ready" may be chosen; if its engine is stuck in a cycle, only
while all others' are stuck, too. Times are seconds of one clock, which is an argument: the fleet's,
or a simulation's. Belongs to one thread.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from specrouter.cluster.correction import Experience, corrections
from specrouter.cluster.prefix_index import SentPrompts
from specrouter.cluster.state import ReplicaState, ReplicaView

Standing = Literal["ready", "silent", "lost", "draining", "failed"]

STUCK_S = 10.0  # in one cycle; also the loading of a drafter may take as long


@dataclass(eq=False, kw_only=True)
class KnownReplica:
    """A replica.

    Attributes:
        standing: only a "ready" replica is chosen.
        why: why it is not ready.
        state: its last state, also from replies, received at `heard_s`.
        reported: its last state from its feed, received at `reported_s`.
        experience: measured over reported times.
        prompts: prompts sent there since its start.
        uncounted: tokens of the prompts sent there since `state`, by request.
    """

    name: str
    standing: Standing = "lost"
    why: str = "has not reported yet"
    state: ReplicaState | None = None
    reported: ReplicaState | None = None
    heard_s: float = 0.0
    reported_s: float = 0.0
    experience: Experience = field(default_factory=Experience)
    prompts: SentPrompts = field(default_factory=SentPrompts)
    uncounted: dict[Hashable, int] = field(default_factory=dict)

    def note(self, state: ReplicaState, now_s: float) -> None:
        """Store a state that came with a reply."""
        self.state, self.heard_s = state, now_s

    def note_state(self, state: ReplicaState, now_s: float) -> None:
        """Store a state that came with the feed."""
        self.note(state, now_s)
        self.reported, self.reported_s = state, now_s

    def view(self, now_s: float, keys: Sequence[bytes]) -> ReplicaView | None:
        """Return the router's view of it; None if it may not be chosen."""
        if self.standing != "ready" or self.state is None or self.reported is None:
            return None
        sent = list(self.uncounted.values())
        return ReplicaView(
            name=self.name,
            state=self.state,
            reported=self.reported,
            age_s=now_s - self.heard_s,
            sent=len(sent),
            sent_tokens=sum(sent),
            matched_tokens=self.prompts.matched_tokens(keys),
        )


KnownT = TypeVar("KnownT", bound=KnownReplica)


class Roster(Generic[KnownT]):
    """The replicas, in the order of `members`."""

    def __init__(self, members: Iterable[KnownT]) -> None:
        self.members: Mapping[str, KnownT] = {one.name: one for one in members}

    def ready(self, now_s: float, keys: Sequence[bytes] = ()) -> list[ReplicaView]:
        """Return views of the replicas that may be chosen, in order.

        `keys` are those of the prompt's blocks.
        """
        found = [member.view(now_s, keys) for member in self.members.values()]
        views = [view for view in found if view is not None]
        views = [view for view in views if view.reported.step_s <= STUCK_S] or views
        known = corrections({view.name: self.members[view.name].experience for view in views})
        return [replace(view, correction=known[view.name]) for view in views]

    def excluded(self, chosen: Iterable[ReplicaView]) -> dict[str, str]:
        """Return the replicas that are not in `chosen`, with the reason."""
        others = self.members.keys() - {view.name for view in chosen}
        return {name: _why_not(one) for name, one in self.members.items() if name in others}


def _why_not(member: KnownReplica) -> str:
    """Return why a replica is not chosen."""
    if member.standing != "ready" or member.reported is None:
        return f"{member.standing}: {member.why}"
    return f"in one cycle for {member.reported.step_s:.0f} s"
