"""Load: the needs of requests with objectives, from now on. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

EPS_MS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A request whose prompt has to be read.

    Attributes:
        deadline_ms: time left until its first token is due.
        tokens: unread prompt tokens, with the one that brings the first token.
        tpot_ms: TPOT of its output; infinite without such an objective.
        kv_tokens: KV that it needs.
        left: tokens of its output after the first one, as far as is known.
        is_soft: the deadline is no objective.
        can_wait: the deadline only keeps the request from waiting for ever.
    """

    id: int
    deadline_ms: float
    tokens: int
    tpot_ms: float
    kv_tokens: int = 0
    is_running: bool = False
    left: float = math.inf
    is_soft: bool = False
    can_wait: bool = False


def by_deadline(prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    return tuple(sorted(prompts, key=lambda each: each.deadline_ms))


@dataclass(frozen=True, eq=False, kw_only=True)
class Load:
    """The requests with objectives, and what each needs.

    Attributes:
        ids: [R] ids of decoding requests that have a TPOT.
        due_ms: [R] time left until each one's next token is due.
        tpot_ms: [R] finite.
        left: [R] tokens that are still to come, as far as is known.
        prompts: prompts of admitted requests, by deadline.
        others: number of requests that decode beside them, a token in a cycle, without a pace.
    """

    ids: tuple[int, ...]
    due_ms: Floats
    tpot_ms: Floats
    left: Floats
    prompts: tuple[Prompt, ...]
    others: int = 0

    def joined(self, prompts: Sequence[Prompt]) -> "Load":
        """Return the load with further admitted prompts."""
        if not prompts:
            return self
        return replace(self, prompts=by_deadline((*self.prompts, *prompts)))

    def without_neediest(self, count: int) -> "Load":
        """Return the load without the paces of so many decoding requests, the tightest ones."""
        if not count:
            return self
        kept = np.sort(np.argsort(self.tpot_ms, kind="stable")[count:])
        ids = tuple(self.ids[place] for place in kept.tolist())
        return replace(
            self,
            ids=ids,
            due_ms=self.due_ms[kept],
            tpot_ms=self.tpot_ms[kept],
            left=self.left[kept],
            others=self.others + len(self.ids) - len(ids),
        )

    @property
    def tightest_ms(self) -> float:
        """The tightest TPOT of decoding requests; infinite if there are none."""
        return float(self.tpot_ms.min(initial=np.inf))
