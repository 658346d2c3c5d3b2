"""Which depth and width suit a chain: successive halving over short measurements.

Pure but for the measurements, which are a function that is handed in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specrouter.request.params import MAX_TREE_TOKENS, Chain

DEPTHS = (1, 2, 3, 4, 6)
WIDTHS = (1, 2, 3)


@dataclass(frozen=True)
class Shape:
    depth: int
    width: int

    def __str__(self) -> str:
        return f"depth {self.depth}, width {self.width}"


@dataclass(frozen=True)
class Tuned:
    """A chain's best shape, and its speed over all the short measurements that it had."""

    chain: Chain
    shape: Shape
    tokens_per_s: float


# (chain, shape, rung) -> tokens, seconds; later rungs may be asked for more tokens
Measure = Callable[[Chain, Shape, int], tuple[int, float]]


def grid(depths: Sequence[int], widths: Sequence[int]) -> list[Shape]:
    """Every shape that a tree may have."""
    return [Shape(d, w) for d in depths for w in widths if d * w <= MAX_TREE_TOKENS]


def tune(chains: Sequence[Chain], shapes: Sequence[Shape], measure: Measure) -> dict[Chain, Tuned]:
    """The faster half of each chain's shapes goes on to the next rung, until one is left.

    All chains climb together, so that a slow minute of the machine is no one chain's. What counts
    is the speed over all rungs so far. A chain with one shape is measured once, to be compared.
    """
    left = {chain: list(shapes) for chain in chains}
    spent: dict[tuple[Chain, Shape], tuple[int, float]] = {}
    rung = 0
    while rung == 0 or any(len(found) > 1 for found in left.values()):
        for chain, found in left.items():
            for shape in found if rung == 0 or len(found) > 1 else ():
                tokens, seconds = measure(chain, shape, rung)
                before = spent.get((chain, shape), (0, 0.0))
                spent[chain, shape] = (before[0] + tokens, before[1] + seconds)
        left = {
            chain: sorted(found, key=lambda shape: -_speed(spent, chain, shape))[
                : (len(found) + 1) // 2
            ]
            for chain, found in left.items()
        }
        rung += 1
    return {
        chain: Tuned(chain, found[0], _speed(spent, chain, found[0]))
        for chain, found in left.items()
    }


def measurements(shapes: int) -> int:
    """That `tune` asks for to find a chain's best shape of so many."""
    left = (shapes + 1) // 2
    return shapes + (measurements(left) if left > 1 else 0)


def _speed(
    spent: Mapping[tuple[Chain, Shape], tuple[int, float]], chain: Chain, shape: Shape
) -> float:
    tokens, seconds = spent[chain, shape]
    return tokens / seconds
