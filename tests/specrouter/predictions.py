"""Snapshots of a pool of four, whose predictions can be worked out by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specrouter.profile.acceptance import TreeAcceptance
from specrouter.profile.snapshot import Pair, PerformanceSnapshot, TreeKey
from specrouter.profile.time_curve import TimeCurve
from specrouter.request.params import Chain

NAMES = ("small", "twin", "middle", "big")
PARAMETERS = {"small": 10, "twin": 10, "middle": 100, "big": 1000}
ALL = frozenset(NAMES)
PAIR = ("small", "big")
TRIPLE: Chain = ("small", "middle", "big")
CERTAIN = 1e9  # trees of evidence that silence the prior


def flat(ms: float) -> TimeCurve:
    """A forward that costs the same however many tokens it has."""
    return TimeCurve(((1, ms), (256, ms)))


def rising(first: float, each: float = 1.0) -> TimeCurve:
    """A forward that costs `first` for one token, and `each` for every other one."""
    return TimeCurve(((1, first), (101, first + 100 * each)))


def geometric(alpha: float) -> TreeAcceptance:
    """In a path the j-th node is accepted with chance alpha ** j."""
    return TreeAcceptance(alpha, CERTAIN)


def snapshot(
    times: Mapping[str, TimeCurve],
    seen: Mapping[Chain, float] | None = None,
    alpha: Mapping[Pair, float] | None = None,
    **others: Any,
) -> PerformanceSnapshot:
    """`seen`: chains whose drafts were often judged, with the geometric law of their trees;
    `alpha`: what the similarity of pairs promises."""
    trees: dict[TreeKey, TreeAcceptance] = {}
    promised: dict[tuple[str, str, bool], float] = {}
    for mode in (False, True):
        for chain, rate in (seen or {}).items():
            trees[chain[:-1], chain[-1], mode] = geometric(rate)
        promised |= {(*pair, mode): rate for pair, rate in (alpha or {}).items()}
    known = PerformanceSnapshot(
        times=times, parameters=PARAMETERS, trees=trees, promised_alpha=promised
    )
    return replace(known, **others)
