"""ChainPolicy: the interface of a policy for chains, and the policies that need no measurements.

A policy chooses the chain of models, and the shape of its drafts, for requests that leave these to
the scheduler. To write one, subclass `ChainPolicy`, override `choose`, and name an instance of it
in a configuration: `scheduler.policy: my_package.my_module:MY_POLICY`.

Contract: pure. A policy knows only its arguments, and keeps nothing between calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specrouter.config import SchedulerConfig
from specrouter.cycle import DraftShape
from specrouter.profile.cycle_times import Workload
from specrouter.profile.prediction import ShapeLimits
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import MAX_TREE_TOKENS, Chain
from specrouter.view import ChainDecision, EngineView

DEFAULT_DEPTH = 4  # of drafts, where neither the configuration nor a request sets it


@dataclass(frozen=True)
class ModelNames:
    """The models that requests may be routed through.

    Attributes:
        available: models that may be used; the target always may.
        held: models that other requests of the cycle draft with; a chain must fit in memory beside
            them.
    """

    available: Collection[str]
    held: frozenset[str] = frozenset()


class CandidateChains(Protocol):
    """The chains of a pool. `ModelChainScheduler` is one.

    Attributes:
        config: the section `scheduler`.
        target: the model that every chain ends in.
        candidates: all chains to consider that fit in memory, the target alone included.
        quoters: text drafters, which may draft in single cycles beside any chosen chain.
    """

    config: SchedulerConfig
    target: str
    candidates: tuple[Chain, ...]
    quoters: frozenset[str]

    def reachable(self, models: ModelNames) -> list[Chain]:
        """Return the candidates that may be used now."""

    def may_use(self, chain: Chain, models: ModelNames) -> bool:
        """Return whether a chain's models are available and fit in memory beside the held ones."""

    def fit(self, chain: Chain, held: Collection[str] = ()) -> bool:
        """Return whether a chain's models fit in memory beside the held ones."""

    def usable(self, chain: Chain, models: ModelNames) -> Chain:
        """Return the chain without the models that may not be used now."""

    def smallest_pair(self) -> Chain:
        """Return the smallest drafter with weights and the target; without one, the target."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The input of a decision.

    Attributes:
        snapshot: measured times and acceptances.
        workload: the requests that the decision is for, and those beside them.
        models: models that may be used.
        limits: depth, width and nodes, as far as the configuration or the requests fix them.
        current: the decision in use; None before the first.
    """

    snapshot: PerformanceSnapshot
    workload: Workload
    models: ModelNames
    limits: ShapeLimits
    current: ChainDecision | None = None


@dataclass(frozen=True, kw_only=True)
class RequestDepth:
    """The depth of one request's drafts, for a policy that sets it per request.

    Attributes:
        levels: levels of its draft.
        together: the most requests that may draft so deep in one cycle; others take turns.
        memory: what the policy gets back about this request in the next cycle.
    """

    levels: int
    together: int
    memory: Any = None


def fitting_width(depth: int, width: int) -> int:
    """Return the width, reduced so that a tree of this depth stays within MAX_TREE_TOKENS."""
    return max(1, min(width, MAX_TREE_TOKENS // depth))


class ChainPolicy(ABC):
    """A policy that chooses the chain of models.

    Attributes:
        takes_chain, needs_chain: whether `scheduler.chain` may, or must, be given.
        drafts_paths: trees have width 1.
        decides_every_cycle: nothing is kept from one cycle to the next.
        learns: it decides by measurements.
        evaluates: idle drafters get shadow evaluations, which keep their acceptances up to date.
        default_depth: levels of drafts where neither the configuration nor a request sets them.
        default_selection: selection of nodes, where `trees.selection` is left out.
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
    def choose(self, pool: CandidateChains, now: Situation) -> ChainDecision:
        """Return the chain and the shape of its drafts, until the decision is due again."""

    def chains(self, pool: CandidateChains) -> Sequence[Chain]:
        """Return all chains that may be chosen; their models are loaded and timed at the start."""
        return pool.candidates

    def depths(self, view: EngineView) -> Mapping[int, RequestDepth] | None:
        """Return the depths by request id, if each request has its own; else None."""
        return None

    def shape(self, limits: ShapeLimits) -> DraftShape:
        """Return the configured shape, completed by `default_depth` and width 1."""
        depth = limits.depth or self.default_depth
        return DraftShape(depth, fitting_width(depth, limits.width or 1), limits.nodes or 0)


class FixedChain(ChainPolicy):
    """The configured chain, if the policy takes one; else the smallest drafter and the target."""

    def choose(self, pool: CandidateChains, now: Situation) -> ChainDecision:
        return ChainDecision(
            chain=pool.usable(self._chain(pool), now.models), shape=self.shape(now.limits)
        )

    def chains(self, pool: CandidateChains) -> Sequence[Chain]:
        return (self._chain(pool),)

    def _chain(self, pool: CandidateChains) -> Chain:
        return pool.config.chain or pool.smallest_pair()


class _TargetOnly(ChainPolicy):
    def choose(self, pool: CandidateChains, now: Situation) -> ChainDecision:
        return ChainDecision(chain=(pool.target,), shape=self.shape(now.limits))

    def chains(self, pool: CandidateChains) -> Sequence[Chain]:
        return ()


class _Static(FixedChain):
    takes_chain = needs_chain = True


STATIC = _Static()
SMALLEST = FixedChain()
TARGET_ONLY = _TargetOnly()
