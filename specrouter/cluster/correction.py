"""Correction: how much slower a replica is than it reports, relative to the other replicas.

A replica reports the times of its own cycles. These do not include other work of its machine,
drafters that read prompts, and prompts that arrive while a request decodes. So for each replica the
router compares measured times with reported ones, by the median ratio of the last requests.

A slowdown that all replicas share does not matter for routing, and engines learn a margin for it
(`PaceMargin`). So all ratios are divided by the smallest one.

Contract: pure. Requests that were not expected to attain their objectives wait for the others, so
of them only ratios below the median count. Otherwise a replica that gets no other requests would
stay slow in the router's view for ever.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Self

_WINDOW = 16  # last requests that count
_FEW = 4  # with fewer requests, a replica's times are not corrected
_LEAST_TOKENS = 8  # after the first; a TPOT is a mean of at least these


@dataclass(frozen=True)
class Correction:
    """Factors for a replica's reported TPOT, and for its TTFT after a request has a row."""

    tpot: float = 1.0
    ttft: float = 1.0


UNCORRECTED = Correction()


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected times of an attempt, before it began; by default unknown, and nothing is learned.

    Attributes:
        wait_ms: reported time until the request has a row and memory.
        first_ms: time from then to its first token.
        tpot_ms: expected TPOT.
        correction: correction that was applied in the prediction.
        is_promised: the request was predicted to attain its objective there.
    """

    wait_ms: float = 0.0
    first_ms: float = 0.0
    tpot_ms: float = 0.0
    correction: Correction = UNCORRECTED
    is_promised: bool = False


def measured_ms(
    began_s: float, came: Sequence[tuple[float, int]]
) -> tuple[float | None, float | None]:
    """Return TTFT and TPOT of an attempt; None without a token, or with too few of them.

    `came` holds the times and numbers of tokens, on the clock of `began_s`.
    """
    if not came:
        return None, None
    (first_s, _), (last_s, _) = came[0], came[-1]
    tokens = sum(count for _, count in came[1:])
    tpot_ms = 1000.0 * (last_s - first_s) / tokens if tokens >= _LEAST_TOKENS else None
    return 1000.0 * (first_s - began_s), tpot_ms


@dataclass(frozen=True)
class Experience:
    """Ratios of measured to reported times of a replica's last requests, the oldest first."""

    tpot: tuple[float, ...] = ()
    ttft: tuple[float, ...] = ()

    @cached_property
    def factors(self) -> tuple[float, float]:
        """Factors for TPOT and TTFT; 1 with too few requests.

        So a replica that is never chosen is tried when the others turn out slower than they report.
        """
        return _usual(self.tpot), _usual(self.ttft)

    def after(self, expected: Expected, ttft_ms: float | None, tpot_ms: float | None) -> Self:
        """Add an attempt's measured times; TTFTs of requests that waited for a row are left out."""
        is_promised, (usual_tpot, usual_ttft) = expected.is_promised, self.factors
        first_ms = 0.0 if expected.wait_ms else expected.first_ms
        tpot = _ratio(tpot_ms, expected.tpot_ms, is_promised, usual_tpot)
        ttft = _ratio(ttft_ms, first_ms, is_promised, usual_ttft)
        return type(self)((*self.tpot, *tpot)[-_WINDOW:], (*self.ttft, *ttft)[-_WINDOW:])


def corrections(known: Mapping[str, Experience]) -> dict[str, Correction]:
    """Return the correction of each replica, relative to the fastest one."""
    tpot = _over_least({name: one.factors[0] for name, one in known.items()})
    ttft = _over_least({name: one.factors[1] for name, one in known.items()})
    return {name: Correction(tpot[name], ttft[name]) for name in known}


def _over_least(factors: Mapping[str, float]) -> dict[str, float]:
    least = min(factors.values(), default=1.0)
    return {name: one / least for name, one in factors.items()}


def _ratio(
    took_ms: float | None, expected_ms: float, is_promised: bool, usual: float
) -> tuple[float, ...]:
    """Return the ratio of measured to reported time, or nothing if it must not count."""
    if took_ms is None or not expected_ms:
        return ()
    ratio = took_ms / expected_ms
    return (ratio,) if is_promised or ratio < usual else ()


def _usual(ratios: Sequence[float]) -> float:
    return median(ratios) if len(ratios) >= _FEW else 1.0
