"""Admission: which waiting requests get rows, and how many prompt tokens each request reads.

`fcfs` admits in the order of the keys (arrival, moved by priority) while there are rows and KV
memory. A fixed chunk of prompt tokens a cycle is shared in the order of admission. No request
overtakes one that waits for memory.

To write another one, subclass `AdmissionPolicy`, override `for_engine`, and name an instance of it
in a configuration: `engine.admission: my_package.my_module:MY_ADMISSION`.

Pure: `(EngineView) -> Admission`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from processors import share_chunk
from specrouter.config import EngineConfig
from specrouter.view import EngineView, RequestTable

Order = Literal["first_come", "objectives"]


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The decisions of admission for one cycle. `fcfs` sets the first three.

    The engine and the simulator follow all of it: the planner is the same.

    Attributes:
        admitted: ids, in the order in which they get rows.
        chunks: prompt tokens by id. One more than are left means the first token as well.
        waits_for_memory: a row is free, and the next request does not fit.
        preempted: ids of running requests that lose row and KV before `admitted` get theirs. They
            keep their tokens and go back to the queue under the same key. Admitted again, they read
            prompt and tokens in one prefill, and go on with the same text.
        declined: ids of waiting requests whose objectives will not be attained. From then on
            `RequestTable.declined` is true for them.
        paused: ids of requests without unread tokens that sit this cycle out, perhaps before their
            first token.
        depths: most tokens to draft for a decoding request, by id; unbounded for others.
        budget_nodes: most draft nodes that the target verifies in this cycle; None: unbounded.
        budget_ms: most time of the cycle; None: unbounded.
        promised: those of `admitted` whose objectives are predicted to be attained.
        lost: ids of running requests that were promised their objectives and will miss them.
        ranks: if KV memory is short, the highest rank is preempted first, and of equal ones the
            last admitted; 0 for others. No request is admitted before a preempted one of a lower
            rank.
        order: order that is followed, `why` the reason; None: there was no choice.
    """

    admitted: tuple[int, ...] = ()
    chunks: Mapping[int, int] = field(default_factory=dict)
    waits_for_memory: bool = False
    preempted: tuple[int, ...] = ()
    declined: tuple[int, ...] = ()
    paused: frozenset[int] = frozenset()
    depths: Mapping[int, int] = field(default_factory=dict)
    budget_nodes: int | None = None
    budget_ms: float | None = None
    promised: frozenset[int] = frozenset()
    lost: tuple[int, ...] = ()
    ranks: Mapping[int, float] = field(default_factory=dict)
    order: Order | None = None
    why: str = ""

    @property
    def has_budget(self) -> bool:
        return not (self.budget_nodes is None and self.budget_ms is None)


Admit = Callable[[EngineView], Admission]


class AdmissionPolicy(ABC):
    """A policy that decides on admission.

    Attributes:
        preempts: running requests may lose their rows to others.
    """

    preempts: bool = False

    @abstractmethod
    def for_engine(self, engine: EngineConfig, target: str) -> Admit:
        """Return the deciding function for an engine of this configuration, with this target."""


class _Fcfs(AdmissionPolicy):
    def for_engine(self, engine: EngineConfig, target: str) -> Admit:
        return fcfs(engine.prefill_chunk)


FCFS = _Fcfs()


def fcfs(prefill_chunk: int) -> Admit:
    """Return the policy that admits first come, first served.

    Args:
        prefill_chunk: prompt tokens that the target reads in a cycle at most.
    """

    def policy(view: EngineView) -> Admission:
        admitted, waits = those_that_fit(view)
        together = view.running.joined(admitted)
        is_reading = together.unread > 0
        if not is_reading.any():
            return Admission(admitted=tuple(admitted.id.tolist()), waits_for_memory=waits)
        reading = together.take(is_reading)
        # The last chunk of a prompt brings the first token.
        shares = share_chunk(reading.unread + 1, prefill_chunk).tolist()
        chunks = dict(zip(reading.id.tolist(), shares, strict=True))
        return Admission(
            admitted=tuple(admitted.id.tolist()),
            chunks={one: share for one, share in chunks.items() if share},
            waits_for_memory=waits,
        )

    return policy


def those_that_fit(view: EngineView) -> tuple[RequestTable, bool]:
    """Return the waiting requests that fit, by key, and whether the next one waits for memory."""
    if not len(view.waiting):
        return view.waiting, False
    waiting = view.waiting.take(np.argsort(view.waiting.priority_key, kind="stable"))
    most = view.free_rows
    if view.kv_free_tokens is not None:
        most = min(most, int((np.cumsum(waiting.kv_tokens) <= view.kv_free_tokens).sum()))
    return waiting.take(np.arange(min(most, len(waiting)))), most < min(
        view.free_rows, len(waiting)
    )
