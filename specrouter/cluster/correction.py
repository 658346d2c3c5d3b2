"""Correction: how much slower a replica is than it reports, relative to the other replicas.

A replica reports the times of its own cycles. Other work of its machine, drafters that read
prompts, and prompts that arrive while a request decodes are not in them. So the router compares,
for each replica, measured times with reported ones: the median ratio of the last requests.

What all replicas take longer than they report does not decide where a request should go, and
engines learn by themselves how much of an objective to keep back for it (`PaceMargin`). So the
smallest ratio of all replicas is divided out.

Contract: pure. Requests that were not expected to attain their objectives wait for the others, so
of them only ratios below the median count. Otherwise a replica that gets no other requests would be
taken for slow for ever.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Self

_WINDOW = 16  # requests that are remembered
_FEW = 4  # with fewer than so many a replica is taken at its word
_LEAST_TOKENS = 8  # after the first, of which a TPOT is a mean


@dataclass(frozen=True)
class Correction:
    """Factors of what is told: of a token's time, and of the first one's, once there is a row."""

    tpot: float = 1.0
    ttft: float = 1.0


AS_TOLD = Correction()


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Of an attempt, before it began. By default nothing is, and nothing learned.

    Attributes:
        wait_ms: by what the replica tells, until the request has row and memory; `first_ms`: from
            then to its first token; `tpot_ms`: of its tokens.
        correction: that was applied to these.
        is_promised: it was found to attain its objective there.
    """

    wait_ms: float = 0.0
    first_ms: float = 0.0
    tpot_ms: float = 0.0
    correction: Correction = AS_TOLD
    is_promised: bool = False


def measured_ms(
    began_s: float, came: Sequence[tuple[float, int]]
) -> tuple[float | None, float | None]:
    """TTFT and TPOT of an attempt; None where there was none, or too few tokens. `came`: when
    tokens came, and how many, by the clock of `began_s`."""
    if not came:
        return None, None
    (first_s, _), (last_s, _) = came[0], came[-1]
    tokens = sum(count for _, count in came[1:])
    tpot_ms = 1000.0 * (last_s - first_s) / tokens if tokens >= _LEAST_TOKENS else None
    return 1000.0 * (first_s - began_s), tpot_ms


@dataclass(frozen=True)
class Experience:
    """Of one replica: measured over told, of its last requests, the oldest first."""

    tpot: tuple[float, ...] = ()
    ttft: tuple[float, ...] = ()

    @cached_property
    def factors(self) -> tuple[float, float]:
        """Of TPOT and TTFT; 1 where too little is known. So one that is never chosen is tried when
        the others turn out to take longer than they tell."""
        return _usual(self.tpot), _usual(self.ttft)

    def after(self, expected: Expected, ttft_ms: float | None, tpot_ms: float | None) -> Self:
        """An attempt, as measured. TTFTs of requests that waited for a row are left out."""
        is_promised, (usual_tpot, usual_ttft) = expected.is_promised, self.factors
        first_ms = 0.0 if expected.wait_ms else expected.first_ms
        tpot = _ratio(tpot_ms, expected.tpot_ms, is_promised, usual_tpot)
        ttft = _ratio(ttft_ms, first_ms, is_promised, usual_ttft)
        return type(self)((*self.tpot, *tpot)[-_WINDOW:], (*self.ttft, *ttft)[-_WINDOW:])


def corrections(known: Mapping[str, Experience]) -> dict[str, Correction]:
    """Of each replica, relative to the fastest one."""
    tpot = _over_least({name: one.factors[0] for name, one in known.items()})
    ttft = _over_least({name: one.factors[1] for name, one in known.items()})
    return {name: Correction(tpot[name], ttft[name]) for name in known}


def _over_least(factors: Mapping[str, float]) -> dict[str, float]:
    least = min(factors.values(), default=1.0)
    return {name: one / least for name, one in factors.items()}


def _ratio(
    took_ms: float | None, told_ms: float, is_promised: bool, usual: float
) -> tuple[float, ...]:
    """What is learned, if anything."""
    if took_ms is None or not told_ms:
        return ()
    ratio = took_ms / told_ms
    return (ratio,) if is_promised or ratio < usual else ()


def _usual(ratios: Sequence[float]) -> float:
    return median(ratios) if len(ratios) >= _FEW else 1.0
