"""Roster: the replicas as a router knows them, and which of them may be chosen.

Contract: one that stands "ready" and told something by itself within `stale_s` may be chosen; where
its engine is stuck in a cycle, only while all others' are. Times are seconds of one clock, which
comes in: the fleet's, or a simulation's. Belongs to one thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, Protocol, TypeVar

from specrouter.cluster.correction import Experience, corrections
from specrouter.cluster.state import ReplicaState, ReplicaView

Standing = Literal["ready", "silent", "lost", "draining", "failed"]

STUCK_S = 10.0  # in one cycle; to load a drafter may take as long


class OnItsWay(Protocol):
    """A request that was sent to a replica. `is_counted`: in the replica's last state."""

    is_counted: bool

    @property
    def prompt_tokens(self) -> int: ...


@dataclass(eq=False, kw_only=True)
class KnownReplica(ABC):
    """A replica.

    Attributes:
        standing: whether it is chosen; only "ready" is. `why`: it is not.
        state: of its last words, heard at `heard_s`; `told`: what it told by itself, at `told_s`.
        experience: of how true its times are.
    """

    name: str
    standing: Standing = "lost"
    why: str = "has not told anything yet"
    state: ReplicaState | None = None
    told: ReplicaState | None = None
    heard_s: float = 0.0
    told_s: float = 0.0
    experience: Experience = field(default_factory=Experience)

    @property
    @abstractmethod
    def on_their_way(self) -> Collection[OnItsWay]:
        """Requests that are there, or sent there."""

    def note(self, state: ReplicaState, now_s: float) -> None:
        """What an answer of its brings along."""
        self.state, self.heard_s = state, now_s

    def tell(self, state: ReplicaState, now_s: float) -> None:
        """News of its own."""
        self.note(state, now_s)
        self.told, self.told_s = state, now_s

    def view(self, now_s: float, stale_s: float) -> ReplicaView | None:
        """None: it may not be chosen."""
        if self.standing != "ready" or self.state is None or self.told is None:
            return None
        if now_s - self.told_s > stale_s:
            return None
        sent = [one.prompt_tokens for one in list(self.on_their_way) if not one.is_counted]
        age_s = now_s - self.heard_s
        return ReplicaView(
            name=self.name,
            state=self.state,
            told=self.told,
            age_s=age_s,
            sent=len(sent),
            sent_tokens=sum(sent),
        )

    def why_not(self, now_s: float, stale_s: float) -> str:
        """It is not chosen."""
        if self.standing != "ready":
            return f"{self.standing}: {self.why}"
        if self.told is None or now_s - self.told_s > stale_s:
            return "stale"
        return f"in one cycle for {self.told.step_s:.0f} s"


KnownT = TypeVar("KnownT", bound=KnownReplica)


class Roster(Generic[KnownT]):
    """Args: `members`: in their order. `stale_s`: see `RoutingConfig`."""

    def __init__(self, members: Iterable[KnownT], stale_s: float) -> None:
        self.members: Mapping[str, KnownT] = {one.name: one for one in members}
        self._stale_s = stale_s
        self._when_lost: list[Callable[[str], None]] = []

    def when_lost(self, listener: Callable[[str], None]) -> None:
        """Told the name of each replica that is lost, has failed or is emptied: whichever serves
        under that name next has begun anew."""
        self._when_lost.append(listener)

    def ready(self, now_s: float) -> list[ReplicaView]:
        """That may be chosen, in their order."""
        found = self._views(now_s)
        known = corrections({view.name: self.members[view.name].experience for view in found})
        return [replace(view, correction=known[view.name]) for view in found]

    def excluded(self, now_s: float) -> dict[str, str]:
        """The others, and why."""
        chosen = {view.name for view in self._views(now_s)}
        return {
            name: member.why_not(now_s, self._stale_s)
            for name, member in self.members.items()
            if name not in chosen
        }

    def _views(self, now_s: float) -> list[ReplicaView]:
        known = [member.view(now_s, self._stale_s) for member in self.members.values()]
        views = [view for view in known if view is not None]
        return [view for view in views if view.told.step_s <= STUCK_S] or views
