"""PB*: prompt tokens that can be read in a time, beside requests that decode at their pace.

Decoding requests are given by their number in each tier; a tier is a TPOT, infinite where decoding
has no objective. In a batch every request verifies as many tokens as suit its tier, so that it may
take longer than a TPOT and read more (section 3.2.3, Appendix D).

Source: SLOs-Serve (arXiv 2504.08784). For its contradictions see research/FIGURES.md.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.batch_time import BatchTime
from specrouter.slo.serve.pacing import MOST_SPECULATED, accepted

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_ROUNDING = 1e-9


class PrefillBudget(ABC):
    """The prefill budget. Counts [..., L] are of each tier's decoding requests; times are in ms."""

    @abstractmethod
    def over(self, spans_ms: Floats, counts: Ints) -> Floats:
        """Return the prompt tokens [...] in each time; -inf if decoding alone takes too long."""

    def holds(self, counts: Ints) -> Bools:
        """Return whether [...] so many requests can decode at their pace."""
        return np.isfinite(self.over(np.zeros(()), counts))


def whole_batches(spans_ms: Floats, batch_ms: Floats | float) -> Floats:
    """Return how many batches end in a time."""
    batches: Floats = np.floor(spans_ms / batch_ms + _ROUNDING)
    return batches


@dataclass(frozen=True)
class Speculation:
    """The speculation of a batch.

    Attributes:
        lengths: tokens that a request of each tier verifies, its root included; 0: the tier has no
            objective or no requests.
        ms: time of the batch, within every tier's TPOT.
        tokens: tokens that it reads, those of decoding requests included.
    """

    lengths: tuple[int, ...]
    ms: float
    tokens: int


# Possible batches: verified tokens [C, L], times [C], and tokens in all [C].
_Candidates = tuple[Ints, Floats, Floats]


@dataclass(frozen=True, eq=False, kw_only=True)
class SpeculativeBudget(PrefillBudget):
    """The prefill budget where all requests speculate.

    Attributes:
        tiers_ms: [L] TPOT of each tier, ascending.
        alpha: chance that a drafted token is accepted, given that the one before it is.
        idle_ms: most time of a batch while no request with an objective decodes.
        margin: share of every TPOT that is kept back, since `alpha` is only a mean.
    """

    times: BatchTime
    tiers_ms: tuple[float, ...]
    alpha: float
    idle_ms: float
    margin: float = 0.0

    @cached_property
    def _found(self) -> dict[tuple[bool, ...], _Candidates]:
        return {}

    def _candidates(self, present: tuple[bool, ...]) -> _Candidates:
        """Return the possible batches if these tiers have requests; cached."""
        found = self._found.get(present)
        if found is None:
            found = self._found[present] = self._find(present)
        return found

    def _find(self, present: tuple[bool, ...]) -> _Candidates:
        """Return one batch for each tier that may bound it, and each length of that tier."""
        if not any(present):
            tokens = self.times.tokens_within(self.idle_ms)
            none = np.zeros((1, len(self.tiers_ms)), dtype=np.int64)
            return none, np.array([self.idle_ms]), np.array([float(tokens)])
        paces = np.array(self.tiers_ms) * (1.0 - self.margin)
        reach = accepted(self.alpha, np.arange(1, MOST_SPECULATED + 1))
        found = []
        # Without drafts there is one length, so a batch may be shorter than the present tiers need.
        bounds = present if self.alpha else np.isfinite(paces)
        for tier in np.flatnonzero(bounds):
            for ms in np.unique(paces[tier] * reach):
                enough = paces[:, None] * reach >= ms * (1.0 - _ROUNDING)  # [L, MOST]
                if not enough[np.array(present), -1].all():
                    continue
                lengths = np.where(present, np.argmax(enough, axis=1) + 1, 0)
                steps = int(lengths.max()) - 1  # the root is not drafted: the paper counts it
                found.append((lengths, ms, float(self.times.tokens_within(float(ms), steps))))
        verified, took_ms, read = zip(*found, strict=True)
        return np.array(verified), np.array(took_ms), np.array(read)

    def best(self, counts: Ints, within_ms: float = np.inf) -> Speculation:
        """Return the batch that reads most prompt tokens per millisecond, for counts [L].

        It is one that ends within a time, if there is any.
        """
        lengths, ms, tokens = self._candidates(tuple(self._held(counts).tolist()))
        rates = (tokens - lengths @ counts) / ms
        ends = ms <= within_ms
        if ends.any():
            rates = np.where(ends, rates, -np.inf)
        best = int(np.argmax(rates))
        return Speculation(tuple(lengths[best].tolist()), float(ms[best]), int(tokens[best]))

    def _held(self, counts: Ints) -> Bools:
        """Return which tiers have requests and a TPOT."""
        return np.asarray((counts > 0) & np.isfinite(self.tiers_ms))

    def over(self, spans_ms: Floats, counts: Ints) -> Floats:
        flat = counts.reshape(-1, counts.shape[-1])
        spans = np.broadcast_to(spans_ms, counts.shape[:-1]).reshape(-1)
        found = np.empty(len(flat))
        held = self._held(flat)
        codes = held @ (1 << np.arange(len(self.tiers_ms)))
        for code in set(codes.tolist()):  # entries with the same tiers have the same batches
            of = codes == code
            lengths, ms, tokens = self._candidates(tuple(held[of.argmax()].tolist()))
            spare = tokens - flat[of] @ lengths.T  # [K, C] prompt tokens of the batches
            read = whole_batches(spans[of][:, None], ms) * spare
            found[of] = np.where(spare >= 0.0, read, -np.inf).max(axis=1)
        return found.reshape(counts.shape[:-1])
