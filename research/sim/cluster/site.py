"""Site: where a replica's process runs: it lives, stands still, dies and is replaced.

Contract: it answers as `specrouter.cluster.replica.ReplicaServer` does: it takes what it is asked
or declines by its state of that moment, tells its state every so often, and with the first and last
message of each request. Messages take their time. A process that stands still does all it missed
when it goes on; one that has died says nothing any more.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from research.sim.cluster.events import CYCLE, MESSAGE, Events, Happen
from research.sim.cluster.job import ClusterJob
from research.sim.cluster.replica import Replica
from specrouter.cluster.admission import attainability
from specrouter.cluster.correction import Expected
from specrouter.cluster.state import ReplicaState, RoutedRequest


@dataclass(frozen=True, eq=False, kw_only=True)
class Ask:
    """An attempt: a request on its way to a replica.

    Attributes:
        expected: of it, when it was sent there, at `sent_s`.
    """

    job: ClusterJob
    routed: RoutedRequest
    may_decline: bool
    attempt: int
    expected: Expected
    sent_s: float

    @property
    def is_current(self) -> bool:
        return self.job.attempt == self.attempt and not self.job.is_done


class Listener(Protocol):
    """What a site says of its requests, and of its state, arrives there."""

    def told(self, name: str, state: ReplicaState) -> None: ...

    def ended(self, name: str, ask: Ask, state: ReplicaState) -> None: ...

    def unanswered(self, name: str, ask: Ask) -> None: ...

    def declined(self, name: str, ask: Ask, state: ReplicaState) -> None: ...

    def taken(self, name: str, ask: Ask, state: ReplicaState) -> None: ...


class Site:
    """Args:
    make: a new process.
    listener: is told after a message's time.
    message_s: that a message takes; states are told every `tells_s`.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Replica],
        events: Events,
        listener: "Listener",
        message_s: float,
        tells_s: float,
    ) -> None:
        self.name = name
        self._make, self._events, self._listener = make, events, listener
        self._message_s, self._tells_s = message_s, tells_s
        self._life = 0  # of the process: what an earlier one had planned does not happen
        self._replica: Replica | None = None
        self._here: list[Ask] = []
        self._stands_still_until_s = 0.0
        self._planned_s: float | None = None  # its next cycle

    # The process

    def start(self, tells_after_s: float = 0.0) -> ReplicaState:
        """A new one; what it tells first."""
        self._life += 1
        self._here, self._planned_s, self._stands_still_until_s = [], None, 0.0
        self._replica = self._make()
        self._replica.run_until(self._events.now_s)
        self._events.after(tells_after_s, self._by_process(self._tell))
        return self._replica.state()

    def replace(self) -> None:
        """By another process, which takes requests once it has told its state."""
        self.start()

    def kill(self) -> None:
        self._life += 1
        self._replica = None

    def stand_still(self, until_s: float) -> None:
        self._stands_still_until_s = until_s

    @property
    def is_alive(self) -> bool:
        return self._replica is not None

    @property
    def stands_still(self) -> bool:
        return self._stands_still_until_s > self._events.now_s

    @property
    def rows_given_s(self) -> Sequence[float]:
        """When requests were given rows, since the process began."""
        return () if self._replica is None else self._replica.rows_given_s

    def offer(self, ask: Ask) -> None:
        """Is answered after the time of two messages."""
        self._events.after(self._message_s, partial(self._come, ask))

    # What it does

    def _by_process(self, happen: Happen, kind: int = MESSAGE) -> Happen:
        """Not at all where the process has died since; later where it stands still."""
        life = self._life

        def run() -> None:
            if self._life != life or self._replica is None:
                return
            if self.stands_still:
                self._events.at(self._stands_still_until_s, run, kind)
                return
            if kind == MESSAGE:
                self._replica.run_until(self._events.now_s)
            happen()
            self._look()

        return run

    def _look(self) -> None:
        """Plans its next cycle, and to tell of whoever has ended when the last token has come."""
        assert self._replica is not None, "it is alive"
        for ask in [one for one in self._here if not _runs(one)]:
            self._here.remove(ask)
            if ask.is_current and ask.job.served is not None:
                last_s = ask.job.served.sent.last_s
                ended = self._by_process(partial(self._end, ask))
                self._events.at(self._events.now_s if math.isnan(last_s) else last_s, ended)
        next_s = self._replica.next_s
        if next_s is not None and next_s != self._planned_s:
            cycle = self._by_process(partial(self._cycle, next_s), CYCLE)
            self._events.at(next_s, cycle, CYCLE)
        self._planned_s = next_s

    def _cycle(self, planned_s: float) -> None:
        if self._planned_s == planned_s:
            self._planned_s = None
            assert self._replica is not None, "it is alive"
            self._replica.go_on(self._events.now_s)

    def _tell(self) -> None:
        self._say(partial(self._told, self._life, self._state()))
        self._events.after(self._tells_s, self._by_process(self._tell))

    def _told(self, life: int, state: ReplicaState) -> None:
        if life == self._life:  # a feed that has ended tells nothing more
            self._listener.told(self.name, state)

    def _end(self, ask: Ask) -> None:
        self._say(partial(self._listener.ended, self.name, ask, self._state()))

    def _come(self, ask: Ask) -> None:
        if self._replica is None:
            self._say(partial(self._listener.unanswered, self.name, ask))
        elif ask.is_current:
            self._by_process(partial(self._judge, ask))()

    def _judge(self, ask: Ask) -> None:
        if not ask.is_current:
            return
        state = self._state()
        found = attainability(state, ask.routed, correction=ask.expected.correction)
        if ask.may_decline and not found.attained:
            self._say(partial(self._listener.declined, self.name, ask, state))
            return
        assert self._replica is not None, "it is alive"
        job = ask.job
        job.served = self._replica.receive(job.request, job.sent_s, job.commits)
        self._here.append(ask)
        self._say(partial(self._listener.taken, self.name, ask, self._state()))

    def _state(self) -> ReplicaState:
        assert self._replica is not None, "it is alive"
        return self._replica.state()

    def _say(self, happen: Happen) -> None:
        """A message on its way comes though its sender dies."""
        self._events.after(self._message_s, happen)


def _runs(ask: Ask) -> bool:
    return ask.is_current and ask.job.served is not None and not ask.job.served.is_done
