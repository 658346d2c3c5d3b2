"""Data of the executor: what a decoding cycle has to do, and its results."""

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


CATCH_UP_TOKENS = 8  # most unread tokens of a row that a model reads in its first drafting pass
CONTEXT_STEP = 128  # tokens: policies see context lengths in multiples of this
LEAST_CHUNK = 2  # tokens a model may read per cycle; with 1 it would never catch up with a row


@dataclass(frozen=True, eq=False)
class Candidates:
    """Drafted nodes of B requests, in any order; nodes of worth 0 are never selected."""

    worth: Floats  # [B, W] chance to be on the accepted path, at most the parent's; 0: no node
    depths: Ints  # [B, W] 1 for children of the root; 0 where there is no node

    def __post_init__(self) -> None:
        assert self.worth.shape == self.depths.shape, "a depth for every worth"

    @cached_property
    def order(self) -> Ints:
        """Indices [B, W] by falling worth; ties: the shallower node, then the lower index."""
        return np.lexsort((self.depths, -self.worth), axis=1)

    @cached_property
    def gains(self) -> Floats:
        """Worths [B, W] in `order`: what each further node adds."""
        return np.take_along_axis(self.worth, self.order, axis=1)

    @cached_property
    def levels(self) -> Ints:
        """Depths [B, W] in `order`."""
        return np.take_along_axis(self.depths, self.order, axis=1)

    @cached_property
    def counts(self) -> Ints:
        """Number of nodes [B] of each request with a worth above 0."""
        counts: Ints = (self.worth > 0).sum(axis=1)
        return counts

    @classmethod
    def together(cls, parts: "Sequence[Candidates]") -> "Candidates":
        """Concatenate the candidates of several groups, padded to the widest one."""
        if len(parts) == 1:  # the usual case
            return parts[0]
        width = max(one.worth.shape[1] for one in parts)
        worth, depths = (
            [np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in arrays]
            for arrays in ([one.worth for one in parts], [one.depths for one in parts])
        )
        return cls(np.concatenate(worth), np.concatenate(depths))

    def best(self, counts: Ints) -> Bools:
        """Return a mask [B, W] of the first `counts[i]` nodes of row i in `order`.

        A count below 0 selects none.
        """
        chosen = np.zeros(self.worth.shape, dtype=np.bool_)
        first = np.arange(self.worth.shape[1]) < counts[:, None]
        np.put_along_axis(chosen, self.order, first, axis=1)
        return chosen


@dataclass(frozen=True)
class DraftShape:
    """Draft trees of `depth` levels of `width` nodes; with depth 0 there are no drafts.

    `nodes` is the mean number of nodes per request that the target verifies; 0 means all of them.
    """

    depth: int = 0
    width: int = 1
    nodes: int = 0


# From rows [B], their candidates, and the number of nodes of other trees in the same pass: a mask
# [B, W] of the nodes that the target verifies.
TreeSelector = Callable[[Ints, Candidates, int], Bools]


def select_nodes(
    selector: TreeSelector, rows: Sequence[Ints], parts: Sequence[Candidates], aside: int
) -> list[Bools]:
    """Return the nodes that the target verifies, one mask [B, W] for each group.

    The selector is called once for all groups.

    Args:
        selector: chooses among the candidates.
        rows: rows [B] of each group.
        parts: candidates of each group.
        aside: number of nodes of other trees that are verified in the same pass.
    """
    chosen = selector(np.concatenate(rows), Candidates.together(parts), aside)
    ends = np.cumsum([len(one) for one in rows])
    return [
        chosen[end - len(own) : end, : part.worth.shape[1]]
        for own, part, end in zip(rows, parts, ends, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Option:
    """A way to run a cycle, with its predicted time and tokens."""

    chain: Chain
    shape: DraftShape = DraftShape()
    cycle_ms: float = 0.0
    tokens: float = 1.0  # committed per request
    ms_per_token: float = 0.0  # T_eff of all requests in the cycle, catching up included
    levels_ms: float = 0.0  # part of the cycle before the target's pass
    plain_ms: float = 0.0  # `cycle_ms` before its correction by earlier outcomes
    plain_tokens: float = 1.0  # `tokens` before that correction
    sampled: bool = True  # the prediction is for sampled requests, not for greedy ones

    @property
    def route(self) -> tuple[Chain, DraftShape]:
        """The chain and the shape, without the prediction."""
        return self.chain, self.shape


@dataclass(frozen=True, eq=False, kw_only=True)
class ChainGroup:
    """Requests that decode through one chain, with trees of one shape.

    Attributes:
        whole: the target verifies all nodes; otherwise those that the cycle's selector chooses.
        branching: for trees of a fixed form, see `DraftProcessor.draft`.
        quotes: a text drafter in the group. It drafts one path where a text repeats itself, and
            replaces the chain for rows where it promises more.
        quoted_ms: [K + 1] predicted time of the cycle by the number of quoted tokens verified, for
            `requests` requests in all. Given only where no other drafter drafts and no request has
            an objective; otherwise the selector chooses the quoted tokens.
    """

    chain: Chain
    shape: DraftShape
    rows: Ints  # ascending
    whole: bool = True
    branching: tuple[int, ...] | None = None
    predicted: Option | None = None  # compared with the outcome; a time of 0.0 is not
    quotes: str | None = None
    quoted_ms: Floats | None = None
    requests: int = 0

    @property
    def leaves_choice(self) -> bool:
        """True if the selector may choose among the group's nodes."""
        return not self.whole


@dataclass(frozen=True)
class ShadowEvaluation:
    """A shadow evaluation of an idle drafter on one row.

    The drafter reads the tokens of the row that it has not read, and returns what it would have
    drafted before each of the last `tokens` output tokens.
    """

    model: str
    row: int
    tokens: int


@dataclass(frozen=True, eq=False, kw_only=True)
class CyclePlan:
    groups: Sequence[ChainGroup]
    prefill_rows: Ints  # ascending, none of them in a group
    prefill_counts: Ints  # tokens of each chunk; all end before the last committed token
    selector: TreeSelector | None = None  # for groups that do not verify whole trees
    shadow_evaluation: ShadowEvaluation | None = None  # runs before the drafts
    budget_nodes: int | None = None  # most verified; None where whole drafts are

    @property
    def rows(self) -> list[int]:
        """Rows of all requests that take part in the cycle."""
        decoding = [row for group in self.groups for row in group.rows.tolist()]
        return [*decoding, *self.prefill_rows.tolist()]


@dataclass(frozen=True, eq=False, kw_only=True)
class Commit:
    """Tokens that a row gained in a cycle.

    `drafted` is the number of draft tokens that the target verified for the row; `draft` holds
    these tokens if the request asks for them.
    """

    row: int
    tokens: list[int]
    chain: Chain  # as used: shorter than planned after a failure
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
    """The results of a cycle.

    Attributes:
        errors: by row, why it cannot continue; only the requests of these rows are affected.
        chains: by row that had a draft, the chain that was used.
        cut_rows: rows whose trees were cut because their texts end soon.
        behind_rows: rows that decoded without a draft, because a model has too many unread tokens.
        quoted_rows: rows whose drafts came from a text drafter instead of the planned chain.
        caught_up: models read tokens that they lacked, which took time beyond the plan.
        is_regular: apart from that, the cycle took no time beyond the plan, ran completely without
            a failed model, and cut few trees.
        selection_failed: the plan's selector failed, and its groups decoded without drafts.
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
    """The target failed; the requests in its pack cannot continue.

    `failures` holds the failures of other models earlier in the same cycle.
    """

    def __init__(self, reason: str, failures: Sequence[ModelFailure]) -> None:
        super().__init__(reason)
        self.failures = tuple(failures)


def share_shortest_first(wanted: Ints, chunk: int) -> Ints:
    """Return how many of `chunk` tokens each row gets [R], the smallest demand first."""
    order = np.argsort(wanted, kind="stable")
    shares = np.zeros_like(wanted)
    shares[order] = share_chunk(wanted[order], chunk)
    return shares
