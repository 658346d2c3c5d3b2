"""ChainPolicy: what a policy for chains is, and those that decide nothing by measurements.

A policy chooses the chain of models, and the shape of its drafts, for requests that leave these to
the scheduler. To write one, subclass `ChainPolicy`, override `choose`, and name an instance of it
in a configuration: `scheduler.policy: my_package.my_module:MY_POLICY`.

Contract: pure. A policy knows what it is told, and keeps nothing between calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specrouter.config import SchedulerConfig
from specrouter.cycle import DraftShape
from specrouter.profile.cycle_times import Workload
from specrouter.profile.prediction import Limits
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import MAX_TREE_TOKENS, Chain
from specrouter.view import ChainDecision, EngineView

DEFAULT_DEPTH = 4  # of drafts, where neither the configuration nor a request says


@dataclass(frozen=True)
class Models:
    """Which models requests may be routed through.

    Attributes:
        available: that may be used; the target always may.
        held: that other requests of the cycle draft with, beside which a chain must have room.
    """

    available: Collection[str]
    held: frozenset[str] = frozenset()


class Candidates(Protocol):
    """The chains of a pool. `ModelChainScheduler` is one.

    Attributes:
        config: the section `scheduler`.
        target: the model that every chain ends in.
        candidates: all chains worth a look that fit in memory, the target alone included.
        quoters: members that quote texts in single cycles, whatever chain is chosen.
    """

    config: SchedulerConfig
    target: str
    candidates: tuple[Chain, ...]
    quoters: frozenset[str]

    def reachable(self, models: Models) -> list[Chain]:
        """The candidates that may be used now."""

    def may_use(self, chain: Chain, models: Models) -> bool:
        """Whether a chain's models are available and have room beside those that are held."""

    def fit(self, chain: Chain, held: Collection[str] = ()) -> bool:
        """Whether a chain's models can be in memory beside those that are held there."""

    def usable(self, chain: Chain, models: Models) -> Chain:
        """A chain without the models that may not be used now."""

    def smallest_pair(self) -> Chain:
        """The smallest drafter that has weights and the target; the target where there is none."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a decision is made from.

    Attributes:
        snapshot: measured times and acceptances.
        workload: the requests that the decision is for, and those beside them.
        models: that may be used.
        limits: depth, width and nodes, as far as the configuration or the requests fix them.
        current: the decision in use; None before the first.
    """

    snapshot: PerformanceSnapshot
    workload: Workload
    models: Models
    limits: Limits
    current: ChainDecision | None = None


@dataclass(frozen=True, kw_only=True)
class RequestDepth:
    """How deep one request drafts, where a policy sets this for each.

    Attributes:
        levels: of its draft.
        together: requests that may draft so deep in one cycle; others take turns.
        memory: what the policy wants to be told of this request in the next cycle.
    """

    levels: int
    together: int
    memory: Any = None


def fitting_width(depth: int, width: int) -> int:
    """The width, or the most with which a tree of this depth stays within MAX_TREE_TOKENS."""
    return max(1, min(width, MAX_TREE_TOKENS // depth))


class ChainPolicy(ABC):
    """Attributes:
    takes_chain, needs_chain: whether `scheduler.chain` may, or must, be given.
    drafts_paths: trees have width 1.
    decides_every_cycle: nothing is kept from one cycle to the next.
    learns: it decides by what was measured.
    evaluates: drafters that are not in use are evaluated beside a cycle from time to time, so that
        what is known of them stays true.
    default_depth: levels of drafts where neither the configuration nor a request says.
    default_selection: of nodes, where `trees.selection` is left out.
    """

    takes_chain: bool = False
    needs_chain: bool = False
    drafts_paths: bool = False
    decides_every_cycle: bool = False
    learns: bool = False
    evaluates: bool = False
    default_depth: int = DEFAULT_DEPTH
    default_selection: str = "whole"

    @abstractmethod
    def choose(self, pool: Candidates, now: Situation) -> ChainDecision:
        """The chain and the shape of its drafts, until the decision is due again."""

    def chains(self, pool: Candidates) -> Sequence[Chain]:
        """All that the policy may choose: their models are loaded and timed at the start."""
        return pool.candidates

    def depths(self, view: EngineView) -> Mapping[int, RequestDepth] | None:
        """By request id, where each request has a depth of its own; None elsewhere."""
        return None

    def shape(self, limits: Limits) -> DraftShape:
        """The configured one, completed by `default_depth` and width 1."""
        depth = limits.depth or self.default_depth
        return DraftShape(depth, fitting_width(depth, limits.width or 1), limits.nodes or 0)


class FixedChain(ChainPolicy):
    """The configured chain, where a policy takes one, else the smallest drafter and the target."""

    def choose(self, pool: Candidates, now: Situation) -> ChainDecision:
        return ChainDecision(
            chain=pool.usable(self._chain(pool), now.models), shape=self.shape(now.limits)
        )

    def chains(self, pool: Candidates) -> Sequence[Chain]:
        return (self._chain(pool),)

    def _chain(self, pool: Candidates) -> Chain:
        return pool.config.chain or pool.smallest_pair()


class _TargetOnly(ChainPolicy):
    """No speculation."""

    def choose(self, pool: Candidates, now: Situation) -> ChainDecision:
        return ChainDecision(chain=(pool.target,), shape=self.shape(now.limits))

    def chains(self, pool: Candidates) -> Sequence[Chain]:
        return ()


class _Static(FixedChain):
    takes_chain = needs_chain = True


STATIC = _Static()
SMALLEST = FixedChain()
TARGET_ONLY = _TargetOnly()
