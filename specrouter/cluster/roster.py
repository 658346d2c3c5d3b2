"""Roster: the replicas as a router knows them, and which of them may be chosen.

Contract: one that stands "ready" may be chosen; where its engine is stuck in a cycle, only while
all others' are. Times are seconds of one clock, which comes in: the fleet's, or a simulation's.
Belongs to one thread.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from specrouter.cluster.correction import Experience, corrections
from specrouter.cluster.prefix_index import SentPrompts
from specrouter.cluster.state import ReplicaState, ReplicaView

Standing = Literal["ready", "silent", "lost", "draining", "failed"]

STUCK_S = 10.0  # in one cycle; to load a drafter may take as long


@dataclass(eq=False, kw_only=True)
class KnownReplica:
    """A replica.

    Attributes:
        standing: whether it is chosen; only "ready" is. `why`: it is not.
        state: of its last words, heard at `heard_s`; `told`: what it told by itself, at `told_s`.
        experience: of how true its times are.
        prompts: that were sent there since it began.
        uncounted: tokens of the prompts that were sent there since `state`, by request.
    """

    name: str
    standing: Standing = "lost"
    why: str = "has not told anything yet"
    state: ReplicaState | None = None
    told: ReplicaState | None = None
    heard_s: float = 0.0
    told_s: float = 0.0
    experience: Experience = field(default_factory=Experience)
    prompts: SentPrompts = field(default_factory=SentPrompts)
    uncounted: dict[Hashable, int] = field(default_factory=dict)

    def note(self, state: ReplicaState, now_s: float) -> None:
        """What an answer of its brings along."""
        self.state, self.heard_s = state, now_s

    def tell(self, state: ReplicaState, now_s: float) -> None:
        """News of its own."""
        self.note(state, now_s)
        self.told, self.told_s = state, now_s

    def view(self, now_s: float, keys: Sequence[bytes]) -> ReplicaView | None:
        """None: it may not be chosen."""
        if self.standing != "ready" or self.state is None or self.told is None:
            return None
        sent = list(self.uncounted.values())
        return ReplicaView(
            name=self.name,
            state=self.state,
            told=self.told,
            age_s=now_s - self.heard_s,
            sent=len(sent),
            sent_tokens=sum(sent),
            matched_tokens=self.prompts.matched_tokens(keys),
        )


KnownT = TypeVar("KnownT", bound=KnownReplica)


class Roster(Generic[KnownT]):
    """Args: `members`: in their order."""

    def __init__(self, members: Iterable[KnownT]) -> None:
        self.members: Mapping[str, KnownT] = {one.name: one for one in members}

    def ready(self, now_s: float, keys: Sequence[bytes] = ()) -> list[ReplicaView]:
        """That may be chosen, in their order, for a prompt whose blocks have these `keys`."""
        found = [member.view(now_s, keys) for member in self.members.values()]
        views = [view for view in found if view is not None]
        views = [view for view in views if view.told.step_s <= STUCK_S] or views
        known = corrections({view.name: self.members[view.name].experience for view in views})
        return [replace(view, correction=known[view.name]) for view in views]

    def excluded(self, chosen: Iterable[ReplicaView]) -> dict[str, str]:
        """The others, and why."""
        others = self.members.keys() - {view.name for view in chosen}
        return {name: _why_not(one) for name, one in self.members.items() if name in others}


def _why_not(member: KnownReplica) -> str:
    """It is not chosen."""
    if member.standing != "ready" or member.told is None:
        return f"{member.standing}: {member.why}"
    return f"in one cycle for {member.told.step_s:.0f} s"
