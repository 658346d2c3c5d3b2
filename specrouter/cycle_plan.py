"""What a decoding cycle is asked to do, and what comes of it: the executor's data, and no more."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specrouter.output import TokenLogprobs
from specrouter.prediction import Chain
from specrouter.tree_selection import TreeSelector

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ChainGroup:
    """Requests that decode through one chain, with trees of `depth` levels of `width` nodes.

    `whole`: the target verifies all nodes; else those that the cycle's selector leaves.
    `inner_rounds`: how often the first intermediate judges a draft. `branching`: of trees of a
    fixed form, see `DraftProcessor.draft`.
    """

    chain: Chain
    depth: int
    rows: Ints  # ascending
    width: int = 1
    hard_rejection: bool = False
    whole: bool = True
    inner_rounds: int = 1
    branching: tuple[int, ...] | None = None

    @property
    def leaves_choice(self) -> bool:
        """A selector may pick among its nodes."""
        return not (self.whole or self.hard_rejection)


@dataclass(frozen=True)
class Audition:
    """An idle drafter reads what it has missed of a row, and says what it would have drafted before
    each of the last `tokens` output tokens."""

    model: str
    row: int
    tokens: int


@dataclass(frozen=True, eq=False)
class CyclePlan:
    groups: Sequence[ChainGroup]
    prefill_rows: Ints  # ascending, none of them in a group
    prefill_counts: Ints  # tokens of each chunk; all end before the last committed token
    selector: TreeSelector | None = None  # of groups that do not verify whole trees
    audition: Audition | None = None  # held before the drafts


@dataclass(frozen=True, eq=False)
class Commit:
    """What a row gained in a cycle. `drafted`: tokens that the target verified for it."""

    row: int
    tokens: list[int]
    chain: Chain  # as it was used, shorter than planned after a failure
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    drafted: int = 0


@dataclass(frozen=True)
class ModelFailure:
    model: str
    error: Exception


@dataclass
class CycleResult:
    """What a cycle brought.

    Attributes:
        errors: why rows cannot go on, whose requests alone are affected.
        cut_rows: whose trees were cut short by the end of their texts.
        behind_rows: that decoded without a draft, since a model has not read enough of their texts.
        caught_up: models read of texts what they lacked, which took time beside the planned.
        is_regular: nothing else did, all of it took place, no model failed, and few trees were cut
            short.
    """

    commits: list[Commit] = field(default_factory=list)
    failures: list[ModelFailure] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    cut_rows: set[int] = field(default_factory=set)
    behind_rows: set[int] = field(default_factory=set)
    caught_up: bool = False
    is_regular: bool = True


class TargetError(RuntimeError):
    """The target failed; the requests that were in its pack cannot go on.

    `failures`: of other models, before it in the same cycle.
    """

    def __init__(self, reason: str, failures: Sequence[ModelFailure]) -> None:
        super().__init__(reason)
        self.failures = tuple(failures)
