"""CycleLog: where the time of the last cycles went.

Contract: a note costs microseconds; differences are taken when somebody asks. Told by the engine's
thread, may be asked by any.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from specrouter.cycle import CyclePlan, CycleResult
from specrouter.request.params import Chain

_CYCLES = 96  # that are told


@dataclass(frozen=True, kw_only=True)
class CycleTimes:
    """One cycle. What the parts leave of `elapsed_ms` is work on logits, and the control plane's.

    Attributes:
        chain: the longest that a group decoded through; () where only prompts were read.
        draft_ms: forwards of models that are neither of the following.
        rescore_ms: of intermediates of the cycle's chains; `verify_ms`: of the target.
        requests: that gained `tokens`.
    """

    chain: Chain
    elapsed_ms: float
    draft_ms: float
    rescore_ms: float
    verify_ms: float
    requests: int
    tokens: int


@dataclass(frozen=True)
class _Noted:
    """`spent_ms`: up to the cycle's end, since the start, by model."""

    chains: tuple[Chain, ...]
    elapsed_ms: float
    gained: tuple[int, ...]
    spent_ms: Mapping[str, float]


class CycleLog:
    def __init__(self, target: str) -> None:
        self._target = target
        self._noted: deque[_Noted] = deque(maxlen=_CYCLES + 1)

    def note(
        self,
        plan: CyclePlan,
        result: CycleResult,
        elapsed_ms: float,
        spent_ms: Mapping[str, float],
    ) -> None:
        """`spent_ms`: up to now; see `PerformanceProfiler`."""
        chains = tuple(group.chain for group in plan.groups)
        gained = tuple(len(commit.tokens) for commit in result.commits)
        self._noted.append(_Noted(chains, elapsed_ms, gained, spent_ms))

    def last(self) -> list[CycleTimes]:
        """Oldest first."""
        return [self._times(before, one) for before, one in pairwise(list(self._noted))]

    def _times(self, before: _Noted, one: _Noted) -> CycleTimes:
        own = {name: ms - before.spent_ms.get(name, 0.0) for name, ms in one.spent_ms.items()}
        verify_ms = own.pop(self._target, 0.0)
        between = {name for chain in one.chains for name in chain[1:-1]}
        rescore_ms = sum(ms for name, ms in own.items() if name in between)
        return CycleTimes(
            chain=max(one.chains, key=len, default=()),
            elapsed_ms=one.elapsed_ms,
            draft_ms=sum(own.values()) - rescore_ms,
            rescore_ms=rescore_ms,
            verify_ms=verify_ms,
            requests=len(one.gained),
            tokens=sum(one.gained),
        )
