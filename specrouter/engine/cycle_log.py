"""A log of the last cycles: the time spent in each model, and the tokens gained.

Contract: a note costs microseconds; differences are computed when the log is read. The engine's
thread writes it, any thread may read it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from specrouter.cycle import CyclePlan, CycleResult
from specrouter.request.params import Chain

_CYCLES = 96  # cycles that are kept


@dataclass(frozen=True, kw_only=True)
class CycleTimes:
    """Times and tokens of one cycle.

    The rest of `elapsed_ms` is work on logits, and the control plane's.

    Attributes:
        chain: the longest one of the cycle's groups; () if only prompts were read.
        draft_ms: time in forwards of all other models.
        rescore_ms: time in forwards of intermediates of the cycle's chains.
        verify_ms: time in forwards of the target.
        requests: requests that gained tokens; `tokens`: what they gained together.
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
    """A cycle as noted; `spent_ms` is each model's total time from the start to the cycle's end."""

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
        """Record a cycle; `spent_ms` is each model's total time up to now, from the profiler."""
        chains = tuple(group.chain for group in plan.groups)
        gained = tuple(len(commit.tokens) for commit in result.commits)
        self._noted.append(_Noted(chains, elapsed_ms, gained, spent_ms))

    def last(self) -> list[CycleTimes]:
        """Return the kept cycles, oldest first."""
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
