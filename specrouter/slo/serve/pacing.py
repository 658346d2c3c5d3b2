"""Pacing: which requests admission can promise their objectives, and what the next batch holds.

`Amortized` is the pacing of the policy `slo`. Pure.
Source: SLOs-Serve (arXiv 2504.08784), sections 3.1 to 3.2.3, Algorithm 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.batch_time import BatchTime, Reserved
from specrouter.slo.serve.load import Load, Prompt

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_SPECULATED = 10  # tokens that a request verifies at most, the root included (Appendix D)


@dataclass(frozen=True)
class Memory:
    """The resources for new requests: rows, and `tokens` of KV; None: unbounded."""

    rows: int
    tokens: int | None = None

    def holds(self, prompts: Sequence[Prompt]) -> bool:
        tokens = sum(each.kv_tokens for each in prompts)
        return len(prompts) <= self.rows and (self.tokens is None or tokens <= self.tokens)


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """The contents and limits of the next batch.

    Attributes:
        ms: most time of the batch.
        tokens: tokens that it may read.
        lengths: [R] tokens that each decoding request of the load verifies; 0: it sits out.
        chunks: tokens of each of the load's prompts.
        room: tokens that are left for others.
        longest_ms: most time of the cycle with any drafts of the planner; None: unbounded.
        spare: requests without an objective that may decode in it at most; None: all.
    """

    ms: float
    tokens: int
    lengths: Ints
    chunks: tuple[int, ...] = ()
    room: int = 0
    longest_ms: float | None = None
    spare: int | None = None

    def reading(self, prompts: Sequence[Prompt]) -> "Batch":
        """Return the batch with as much of the prompts, in this order, as there is room for."""
        room, chunks = self.tokens - int(self.lengths.sum()), list[int]()
        for prompt in prompts:
            chunks.append(max(0, min(room, prompt.tokens)))
            room -= chunks[-1]
        return replace(self, chunks=tuple(chunks), room=room)


@dataclass(frozen=True)
class Choice:
    """The result of a decision on new requests.

    Attributes:
        admitted: the new ones that are admitted.
        in_time: those admitted before stay in time, except the `given_up` neediest.
    """

    admitted: tuple[Prompt, ...] = ()
    in_time: bool = True
    given_up: int = 0


@dataclass(frozen=True)
class Pacing(ABC):
    """The pacing by the times of one machine.

    Attributes:
        times: times of batches.
        idle_ms: most time of a batch while no request with an objective decodes.
        alpha: chance that a drafted token is accepted, given that the one before it is; 0: no
            drafts.
        margin: share of every TPOT that is kept back, since `alpha` is only a mean, and further
            prompts are still to come.
    """

    times: BatchTime
    idle_ms: float
    alpha: float = 0.0
    margin: float = 0.0

    @cached_property
    def reach(self) -> Floats:
        """The mean tokens from verifying 1, 2, 3, ... of a request, its root included."""
        return accepted(self.alpha, np.arange(1, (MOST_SPECULATED if self.alpha else 1) + 1))

    @cached_property
    def fastest_ms(self) -> float:
        """The TPOT of a request alone."""
        found = enumerate(self.reach.tolist())
        return min(self.times.ms(drafted + 1, drafted) / float(each) for drafted, each in found)

    @property
    def promised_ms(self) -> float:
        """The least TPOT that is promised to a request."""
        return self.fastest_ms / (1.0 - self.margin)

    def beside(self, tokens: int) -> Self:
        """Return the pacing if so many tokens of every batch belong to others."""
        return replace(self, times=Reserved(self.times, tokens))

    @abstractmethod
    def choose(self, load: Load, new: Sequence[Prompt], memory: Memory) -> Choice:
        """Choose the new prompts to admit; `in_time`: those admitted before stay in time."""

    @abstractmethod
    def batch(self, load: Load, choice: Choice) -> Batch:
        """Return the next batch of a load, which has the requests that were chosen."""


def accepted(alpha: float, lengths: Ints) -> Floats:
    """Return Acc(s) = (1 - alpha^s) / (1 - alpha): tokens from verifying s, the root included."""
    if alpha >= 1.0:
        return lengths.astype(np.float64)
    found: Floats = (1.0 - np.power(alpha, lengths.astype(np.float64))) / (1.0 - alpha)
    return found
