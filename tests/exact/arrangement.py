"""The ways in which one request can be served, and a short list that pairs all of them.

Contract: none of what an `Arrangement` holds may change a token. `covering_array` returns rows
such that every two settings that can meet in one row do meet in at least one.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from specrouter import ChainRouter, Speculation
from specrouter.params import MAX_TREE_TOKENS

Chain = tuple[str, ...]
Mode = Literal["off", "adaptive"] | Chain

BATCHES = (1, 4, 16)
DEPTHS = (1, 4, 7)
WIDTHS = (1, 2, 4)


@dataclass(frozen=True)
class Arrangement:
    """`mode` with `batch` requests in flight; `depth` and `width` of the token trees.

    Both are None where the mode ignores them.
    """

    mode: Mode
    batch: int
    depth: int | None = None
    width: int | None = None

    @property
    def speculation(self) -> Literal["off"] | Speculation | None:
        """The argument that asks the router for it."""
        if self.mode == "off":
            return "off"
        if self.mode == "adaptive":
            return None
        return Speculation(chain=self.mode, depth=self.depth, width=self.width)

    def __str__(self) -> str:
        mode = self.mode if isinstance(self.mode, str) else ">".join(self.mode)
        depth = "" if self.depth is None else f" depth {self.depth}"
        width = "" if self.width is None else f" width {self.width}"
        return f"{mode} batch {self.batch}{depth}{width}"


def chains(names: Sequence[str], target: str, size: Callable[[str], int]) -> list[Chain]:
    """Every chain of two or three models that ends in the target and strictly grows in size.

    A drafter need not be smaller than the target, only smaller than what stands between them. One
    without weights is smaller than all, so it only ever stands first.
    """
    drafters = [name for name in names if name != target]
    pairs: list[Chain] = [(name, target) for name in drafters]
    triples: list[Chain] = [
        (first, second, target)
        for first, second in itertools.combinations(drafters, 2)
        if size(first) < size(second)
    ]
    return pairs + triples


def modes_of(router: ChainRouter) -> list[Mode]:
    """Off, every chain of the router's pool, and the scheduler's own choice."""
    pool = router.pool
    return ["off", *chains(pool.names, pool.target, pool.parameter_count), "adaptive"]


def covering_array(
    modes: Sequence[Mode],
    batches: Sequence[int] = BATCHES,
    depths: Sequence[int] = DEPTHS,
    widths: Sequence[int] = WIDTHS,
) -> list[Arrangement]:
    """Greedy: the arrangement that adds the most uncovered pairs comes next."""
    trees = [t for t in itertools.product(depths, widths) if math.prod(t) <= MAX_TREE_TOKENS]
    candidates = [
        Arrangement(mode, batch, depth, width)
        for mode in modes
        for batch in batches
        for depth, width in ([(None, None)] if isinstance(mode, str) else trees)
    ]
    missing = {pair for candidate in candidates for pair in pairs_of(candidate)}
    rows: list[Arrangement] = []
    while missing:
        best = max(candidates, key=lambda candidate: len(pairs_of(candidate) & missing))
        rows.append(best)
        missing -= pairs_of(best)
    return rows


def pairs_of(row: Arrangement) -> set[tuple[object, object]]:
    """The pairs of settings that one row covers."""
    settings: list[tuple[str, object]] = [("mode", row.mode), ("batch", row.batch)]
    trees = (("depth", row.depth), ("width", row.width))
    settings += [(name, value) for name, value in trees if value is not None]
    return set(itertools.combinations(settings, 2))
