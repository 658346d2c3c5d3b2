"""PerformanceSnapshot: all that a decision may depend on, as it is known at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrouter.profile.acceptance import TreeAcceptance
from specrouter.profile.time_curve import ForwardTimes, TimeCurve
from specrouter.request.params import Chain

Floats = NDArray[np.float64]

Pair = tuple[str, str]  # who proposed, who verified
Mode = bool  # are tokens sampled, or chosen greedily?
# Who proposed a tree (all levels but the last), who verified it, how.
TreeKey = tuple[Chain, str, Mode]
OutcomeKey = tuple[Chain, int, Mode]  # of cycles at about one load, see `load_of`


@dataclass(frozen=True)
class Outcome:
    """How a chain's cycles came out against their predictions: factors, 1.0 where as predicted."""

    time: float = 1.0
    tokens: float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class PerformanceSnapshot:
    """All that a scheduling decision may depend on, beside the configuration and the workload.

    `stages` are the engine's own times: "draft" per step of a model over rows x width places,
    "verify" over the places whose logits are looked at; and of all that is around these over
    requests, "cycle" where nobody drafts, "drafting" where somebody does, and "quoting" where only
    quotations are drafted.
    """

    times: Mapping[str, ForwardTimes]
    parameters: Mapping[str, int]
    means_ms: Mapping[str, float] = field(default_factory=dict)  # of forwards of any size
    similarity: Mapping[Pair, float] = field(default_factory=dict)
    trees: Mapping[TreeKey, TreeAcceptance] = field(default_factory=dict)
    # alpha as the SimScore promises it, by pair and mode
    promised_alpha: Mapping[tuple[str, str, Mode], float] = field(default_factory=dict)
    stages: Mapping[str, TimeCurve] = field(default_factory=dict)
    outcomes: Mapping[OutcomeKey, Outcome] = field(default_factory=dict)
    # Of chains that did not run, by load and mode.
    usual_outcomes: Mapping[tuple[int, Mode], Outcome] = field(default_factory=dict)
    idle_cycles: Mapping[str, int] = field(default_factory=dict)  # since a model was used
    machine: float = 1.0  # how slow the machine is now, against its quiet self
    learning_ms: float = 0.0  # time of the cycles that taught, older ones faded
    explored_share: float = 0.0  # of it that shadow evaluations have cost
    is_learning: bool = True
    # What follows from the fields above alone is found once.
    offers: dict[Any, tuple[Floats, Floats]] = field(default_factory=dict, init=False, repr=False)
    target_ms: dict[Any, Floats] = field(default_factory=dict, init=False, repr=False)

    def exploration_ms(self, share: float) -> float:
        """What shadow evaluations may take now, if they may take so much of the time; none where
        nothing is learned."""
        return max(0.0, share - self.explored_share) * self.learning_ms if self.is_learning else 0.0


def load_of(requests: int) -> int:
    """Numbers of requests whose cycles come out alike against their predictions: a power of 2."""
    return 1 << max(0, requests - 1).bit_length()


def outcome_of(
    snapshot: PerformanceSnapshot, chain: Chain, requests: int, sampled: Mode
) -> Outcome:
    """How predictions of a chain came out at about this load, in this mode."""
    load = load_of(requests)
    usual = snapshot.usual_outcomes.get((load, sampled), Outcome())
    return snapshot.outcomes.get((chain, load, sampled), usual)
