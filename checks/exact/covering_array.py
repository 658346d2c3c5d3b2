"""A short list of arrangements that pairs all settings.

Contract: every two settings that can meet in one row do meet in at least one. Which nodes are
selected of which trees is a setting of the policies that leave both open; whether requests have
objectives, which policy admits them, whether they may use the prefix cache, and how the target
keeps its weights, are settings of all.
"""

import functools
import itertools
import math
from collections.abc import Hashable, Sequence

from checks.exact.arrangement import (
    SELECTIONS,
    Arrangement,
    Mixed,
    Mode,
    Routed,
    Trees,
)
from modelpool.config import Weights
from specrouter.config.policies import ADMISSION_POLICIES
from specrouter.request.params import MAX_TREE_TOKENS

# Of rows that cover as much the first is taken: a token among 16 costs half of one among 4.
BATCHES = (1, 16, 4)
DEPTHS = (1, 4, 7)
WIDTHS = (1, 2, 4)
# Of all requests, roots and prompts included: fewer than a large batch has roots, and plenty.
BUDGETS_TOKENS = (6, 48)
_BUDGETED = ("adaserve", "adaserve-as-decided", "global-greedy", "equal-greedy")
_SELECTIVE = ("adaptive", "static")  # policies; the others verify what they draft

Pair = tuple[Hashable, Hashable]


def covering_array(
    modes: Sequence[Mode],
    batches: Sequence[int] = BATCHES,
    depths: Sequence[int] = DEPTHS,
    weights: Sequence[Weights] = ("auto",),
) -> list[Arrangement]:
    """Greedy: the arrangement that adds the most uncovered pairs comes next."""
    settings = modes, batches, depths, weights
    return list(_covering_array(*map(tuple, settings)))


@functools.cache  # a check asks for each of its dtypes
def _covering_array(
    modes: tuple[Mode, ...],
    batches: tuple[int, ...],
    depths: tuple[int, ...],
    weights: tuple[Weights, ...],
) -> tuple[Arrangement, ...]:
    shapes = [t for t in itertools.product(depths, WIDTHS) if math.prod(t) <= MAX_TREE_TOKENS]
    candidates = [
        Arrangement(
            mode=mode,
            batch=batch,
            depth=depth,
            width=width,
            urgent=urgent,
            trees=trees,
            admission=admission,
            cached=cached,
            weights=kept,
        )
        for mode in modes
        for batch in batches
        for depth, width in _shapes(mode, shapes)
        for urgent in (True, False)
        for trees in _trees(mode)
        for admission in ADMISSION_POLICIES.names
        for cached in (True, False)
        for kept in weights
    ]
    numbers: dict[Pair, int] = {}  # of settings, then of pairs of these: bits are fast to compare
    bits: dict[tuple[int, int], int] = {}
    pairs = []
    for candidate in candidates:
        own = [numbers.setdefault(one, len(numbers)) for one in settings_of(candidate)]
        found = 0
        for pair in itertools.combinations(own, 2):
            found |= bits.setdefault(pair, 1 << len(bits))
        pairs.append(found)
    missing = (1 << len(bits)) - 1
    rows: list[Arrangement] = []
    while missing:
        best = max(range(len(candidates)), key=lambda index: (pairs[index] & missing).bit_count())
        rows.append(candidates[best])
        missing &= ~pairs[best]
    return tuple(rows)


def pairs_of(row: Arrangement) -> set[Pair]:
    """The pairs of settings that one row covers."""
    return set(itertools.combinations(settings_of(row), 2))


def settings_of(row: Arrangement) -> list[Pair]:
    """Their names and values, in an order that all rows share."""
    settings: list[Pair] = [("mode", row.mode), ("batch", row.batch), ("urgent", row.urgent)]
    settings += [("admission", row.admission), ("cached", row.cached)]
    settings.append(("weights", row.weights))
    given = ((name, getattr(row, name)) for name in ("depth", "width"))
    settings += [(name, value) for name, value in given if value is not None]
    return [*settings, *row.trees]


def _shapes(mode: Mode, trees: Sequence[tuple[int, int]]) -> list[tuple[int | None, int | None]]:
    """Depth and width with which the mode can be asked for."""
    chain = mode.chain if isinstance(mode, Routed) else mode if isinstance(mode, tuple) else None
    if chain is None and not (isinstance(mode, Routed) and mode.policy in ("paper", "smallest")):
        return [(None, None)]
    return list(trees)


def _trees(mode: Mode) -> list[Trees]:
    """Selections and budgets between which the mode leaves the choice."""
    routed = mode.routed if isinstance(mode, Mixed) else mode
    if not isinstance(routed, Routed) or routed.policy not in _SELECTIVE or routed.nodes:
        return [()]
    return [
        (("selection", selection), *budget)
        for selection in SELECTIONS
        for budget in _budgets(selection)
    ]


def _budgets(selection: str) -> list[Trees]:
    """None, which leaves it to the measured times, and `BUDGETS_TOKENS`."""
    given: list[Trees] = [(("budget_tokens", tokens),) for tokens in BUDGETS_TOKENS]
    return [(), *given] if selection in _BUDGETED else [()]
