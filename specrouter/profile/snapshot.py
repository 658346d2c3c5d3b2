"""PerformanceSnapshot: the measurements that a decision may depend on, at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.acceptance import TreeAcceptance
from specrouter.profile.time_curve import TimeCurve
from specrouter.request.params import Chain

Floats = NDArray[np.float64]

Pair = tuple[str, str]  # proposer, verifier
Mode = bool  # True: tokens are sampled; False: greedy
# Proposers of a tree (all models but the last), its verifier, and the mode.
TreeKey = tuple[Chain, str, Mode]
OutcomeKey = tuple[Chain, int, Mode]  # chain, load (see `load_of`), mode


@dataclass(frozen=True)
class ChainOutcome:
    """The outcome of a chain's cycles over their predictions: factors, 1.0 where as predicted."""

    time: float = 1.0
    tokens: float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class PerformanceSnapshot:
    """The measurements that a scheduling decision may depend on.

    `stages` are the engine's own times: "draft" per step of a model over rows x width places,
    "verify" over the places whose logits are read; and for the rest, by requests, "cycle" without
    drafts, "drafting" with a drafting model, and "quoting" where only text drafters draft.
    """

    times: Mapping[str, TimeCurve]
    parameters: Mapping[str, int]
    means_ms: Mapping[str, float] = field(default_factory=dict)  # over passes of all sizes
    similarity: Mapping[Pair, float] = field(default_factory=dict)
    trees: Mapping[TreeKey, TreeAcceptance] = field(default_factory=dict)
    # alpha as predicted from the SimScore, by pair and mode
    promised_alpha: Mapping[tuple[str, str, Mode], float] = field(default_factory=dict)
    stages: Mapping[str, TimeCurve] = field(default_factory=dict)
    outcomes: Mapping[OutcomeKey, ChainOutcome] = field(default_factory=dict)
    # For chains that did not run, by load and mode.
    usual_outcomes: Mapping[tuple[int, Mode], ChainOutcome] = field(default_factory=dict)
    idle_cycles: Mapping[str, int] = field(default_factory=dict)  # since a model was used
    machine: float = 1.0  # current slowdown of the machine; 1.0: normal speed
    learning_ms: float = 0.0  # time of the cycles that were learned from, older ones faded
    explored_share: float = 0.0  # share of it spent on shadow evaluations
    is_learning: bool = True
    # Caches of values that follow from the fields above alone.
    offers: dict[Any, tuple[Floats, Floats]] = field(default_factory=dict, init=False, repr=False)
    target_ms: dict[Any, Floats] = field(default_factory=dict, init=False, repr=False)

    def exploration_ms(self, share: float) -> float:
        """Return the time that shadow evaluations may take now, given their share of the time.

        0 if nothing is learned.
        """
        return max(0.0, share - self.explored_share) * self.learning_ms if self.is_learning else 0.0


def load_of(requests: int) -> int:
    """Return the load class of a number of requests: it rounded up to a power of 2."""
    return 1 << max(0, requests - 1).bit_length()


def outcome_of(
    snapshot: PerformanceSnapshot, chain: Chain, requests: int, sampled: Mode
) -> ChainOutcome:
    """Return the outcome of a chain at about this load, in this mode, or the usual one."""
    load = load_of(requests)
    usual = snapshot.usual_outcomes.get((load, sampled), ChainOutcome())
    return snapshot.outcomes.get((chain, load, sampled), usual)
