"""What a decoding cycle is asked to do, and what comes of it: the executor's data, and no more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from processors import share_chunk
from specrouter.request.output import CycleDraft, TokenLogprobs
from specrouter.request.params import Chain

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


CATCH_UP_TOKENS = 8  # of a row, that a model reads in passing, in the forward that it drafts with
CONTEXT_STEP = 128  # tokens: policies are told how long contexts are in whole steps
LEAST_CHUNK = 2  # tokens that a model may read in a cycle: a row grows by one while it does


@dataclass(frozen=True, eq=False)
class Candidates:
    """Drafted nodes of B requests. Nodes of worth 0 are never taken; parents may stand anywhere."""

    worth: Floats  # [B, W] chance of being on the verifier's walk, at most the parent's; 0: no node
    depths: Ints  # [B, W] 1 for children of the root; 0 where there is no node

    def __post_init__(self) -> None:
        assert self.worth.shape == self.depths.shape, "a depth for every worth"

    @cached_property
    def order(self) -> Ints:
        """[B, W] indices by falling worth; ties to the shallower, then to the lower index."""
        return np.lexsort((self.depths, -self.worth), axis=1)

    @cached_property
    def gains(self) -> Floats:
        """[B, W] worths in `order`: what each further node adds."""
        return np.take_along_axis(self.worth, self.order, axis=1)

    @cached_property
    def levels(self) -> Ints:
        """[B, W] depths in `order`."""
        return np.take_along_axis(self.depths, self.order, axis=1)

    @cached_property
    def counts(self) -> Ints:
        """[B] how many nodes a request has that are worth anything."""
        counts: Ints = (self.worth > 0).sum(axis=1)
        return counts

    @classmethod
    def together(cls, parts: "Sequence[Candidates]") -> "Candidates":
        """Those of several groups one after the other, as wide as the widest."""
        if len(parts) == 1:  # as in most cycles
            return parts[0]
        width = max(one.worth.shape[1] for one in parts)
        worth, depths = (
            [np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in arrays]
            for arrays in ([one.worth for one in parts], [one.depths for one in parts])
        )
        return cls(np.concatenate(worth), np.concatenate(depths))

    def best(self, counts: Ints) -> Bools:
        """[B, W] the first `counts[i]` nodes of row i in `order`; none below 0."""
        chosen = np.zeros(self.worth.shape, dtype=np.bool_)
        first = np.arange(self.worth.shape[1]) < counts[:, None]
        np.put_along_axis(chosen, self.order, first, axis=1)
        return chosen


@dataclass(frozen=True)
class DraftShape:
    """Draft trees of `depth` levels of `width` nodes; depth 0: nobody drafts.

    `nodes`: of each request's tree, in the mean, that the target verifies; 0: all of them.
    """

    depth: int = 0
    width: int = 1
    nodes: int = 0


# Of the candidate trees of rows [B], where so many nodes of other trees are verified beside them:
# what the target verifies, [B, W].
TreeSelector = Callable[[Ints, Candidates, int], Bools]


def select_nodes(
    selector: TreeSelector, rows: Sequence[Ints], parts: Sequence[Candidates], aside: int
) -> list[Bools]:
    """What the target verifies of each group, [B, W]: a selector looks at all groups at once.

    Args:
        rows: [B] of each group; `parts`: its candidates.
        aside: nodes of other trees that are verified beside them.
    """
    chosen = selector(np.concatenate(rows), Candidates.together(parts), aside)
    ends = np.cumsum([len(one) for one in rows])
    return [
        chosen[end - len(own) : end, : part.worth.shape[1]]
        for own, part, end in zip(rows, parts, ends, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run a cycle, and what is predicted of it."""

    chain: Chain
    shape: DraftShape = DraftShape()
    cycle_ms: float = 0.0
    tokens: float = 1.0  # committed per request
    ms_per_token: float = 0.0  # T_eff of all in the cycle, catching up included
    levels_ms: float = 0.0  # of the cycle, before the target's pass
    plain_ms: float = 0.0  # of the cycle, and tokens, before earlier outcomes corrected them
    plain_tokens: float = 1.0
    sampled: bool = True  # of the workload that it is predicted for

    @property
    def route(self) -> tuple[Chain, DraftShape]:
        """All but the prediction."""
        return self.chain, self.shape


@dataclass(frozen=True, eq=False, kw_only=True)
class ChainGroup:
    """Requests that decode through one chain, with trees of one shape.

    `whole`: the target verifies all nodes; else those that the cycle's selector leaves.
    `branching`: of trees of a fixed form, see `DraftProcessor.draft`.
    `quotes`: a member without weights that drafts one path where texts are quoted, in the chain's
    place where it promises more for a row.
    `quoted_ms` [K + 1]: what the cycle takes by the quoted tokens that are verified, where nobody
    else drafts and no request has an objective, of `requests` in all; else the selector picks them.
    """

    chain: Chain
    shape: DraftShape
    rows: Ints  # ascending
    whole: bool = True
    branching: tuple[int, ...] | None = None
    predicted: Option | None = None  # whose outcome the cycle tells; a time of 0.0 is not told
    quotes: str | None = None
    quoted_ms: Floats | None = None
    requests: int = 0

    @property
    def leaves_choice(self) -> bool:
        """A selector may pick among its nodes."""
        return not self.whole


@dataclass(frozen=True)
class ShadowEvaluation:
    """An idle drafter reads what it has missed of a row, and says what it would have drafted before
    each of the last `tokens` output tokens."""

    model: str
    row: int
    tokens: int


@dataclass(frozen=True, eq=False, kw_only=True)
class CyclePlan:
    groups: Sequence[ChainGroup]
    prefill_rows: Ints  # ascending, none of them in a group
    prefill_counts: Ints  # tokens of each chunk; all end before the last committed token
    selector: TreeSelector | None = None  # of groups that do not verify whole trees
    shadow_evaluation: ShadowEvaluation | None = None  # before the drafts
    budget_nodes: int | None = None  # that it is good for; None where whole drafts are verified

    @property
    def rows(self) -> list[int]:
        """Of all requests that take part."""
        decoding = [row for group in self.groups for row in group.rows.tolist()]
        return [*decoding, *self.prefill_rows.tolist()]


@dataclass(frozen=True, eq=False, kw_only=True)
class Commit:
    """What a row gained in a cycle. `drafted`: tokens that the target verified for it; `draft`:
    which they were, where its request asks."""

    row: int
    tokens: list[int]
    chain: Chain  # as it was used, shorter than planned after a failure
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    drafted: int = 0
    draft: CycleDraft | None = None


@dataclass(frozen=True)
class ModelFailure:
    model: str
    error: Exception


@dataclass(kw_only=True)
class CycleResult:
    """What a cycle brought.

    Attributes:
        errors: why rows cannot go on, whose requests alone are affected.
        chains: of the rows that were drafted for, as they were used.
        cut_rows: whose trees were cut short by the end of their texts.
        behind_rows: that decoded without a draft, since a model has not read enough of their texts.
        quoted_rows: whose drafts were quoted, not made by the chain that was planned.
        caught_up: models read of texts what they lacked, which took time beside the planned.
        is_regular: nothing else did, all of it took place, no model failed, and few trees were cut
            short.
        selection_failed: the plan's selector could not be used, whose groups went without drafts.
    """

    commits: list[Commit] = field(default_factory=list)
    failures: list[ModelFailure] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    chains: dict[int, Chain] = field(default_factory=dict)
    cut_rows: set[int] = field(default_factory=set)
    behind_rows: set[int] = field(default_factory=set)
    quoted_rows: set[int] = field(default_factory=set)
    caught_up: bool = False
    is_regular: bool = True
    selection_failed: bool = False


class TargetError(RuntimeError):
    """The target failed; the requests that were in its pack cannot go on.

    `failures`: of other models, before it in the same cycle.
    """

    def __init__(self, reason: str, failures: Sequence[ModelFailure]) -> None:
        super().__init__(reason)
        self.failures = tuple(failures)


def share_shortest_first(wanted: Ints, chunk: int) -> Ints:
    """[R] of `chunk` tokens, what each row gets that wants so many."""
    order = np.argsort(wanted, kind="stable")
    shares = np.zeros_like(wanted)
    shares[order] = share_chunk(wanted[order], chunk)
    return shares
