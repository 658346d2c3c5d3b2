"""ModelChainScheduler: the choice of the chain that drafts and verifies next, and of its trees.

A chain runs from the drafter through intermediates to the target. The scheduler keeps the chains
that a pool allows. A policy chooses among them (`routing.chain_policy`, `routing.adaptive`).

Decisions are pure functions of a snapshot: no clock, no randomness, no tensors.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

from modelpool.errors import ConfigError
from specrouter.config import SchedulerConfig
from specrouter.config.policies import CHAIN_POLICIES
from specrouter.cycle import DraftShape, Option
from specrouter.profile.cycle_times import Workload
from specrouter.profile.prediction import OptionGrid, ShapeLimits, target_only
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.routing.chain_policy import ChainPolicy, ModelNames, Situation
from specrouter.view import SCHEDULED, ChainDecision, Override

LONGEST_CHAIN = 3  # models of a chosen chain; one that a request names may be longer
NO_ROOM = "pool.max_loaded_models or pool.memory_limit_mb leaves no room for its models at once"


def candidate_chains(
    names: Sequence[str],
    parameters: Mapping[str, int],
    target: str,
    longest: int | None = None,
) -> tuple[Chain, ...]:
    """Return all chains in which every drafting model is larger than the one before.

    `names` are weakest first. Models of one size, such as specialists, never verify each other.
    There are exponentially many chains unless `longest` limits the models of a chain.
    """
    others = [name for name in names if name != target]
    most = len(others) if longest is None else min(len(others), longest - 1)
    chains = [
        (*drafters, target)
        for length in range(most + 1)
        for drafters in itertools.combinations(others, length)
    ]
    return tuple(
        chain
        for chain in chains
        if all(parameters[a] < parameters[b] for a, b in itertools.pairwise(chain[:-1]))
    )


class ModelChainScheduler:
    """The candidate chains (`chain_policy.Candidates`); all else comes with the snapshot.

    Args:
        config: the section `scheduler`.
        names: names of all models, weakest first.
        parameters: their sizes; 0 for text drafters.
        target: the model that every chain ends in.
        only_paths: trees have width 1 (`engine.exact: strict`).
        whole_trees: the target verifies all drafted nodes.
        quoters: text drafters. They are part of no chosen chain, unless the depth is fixed; they
            draft in single cycles in which that pays.
        fit_together: returns whether models fit in memory together. In a chain that does not fit,
            one model would be evicted for another in every cycle.

    Raises:
        ConfigError: a configured chain does not fit, or has a model that is not in the pool; it
            names the field.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        names: Sequence[str],
        parameters: Mapping[str, int],
        target: str,
        only_paths: bool = False,
        whole_trees: bool = False,
        quoters: Collection[str] = (),
        fit_together: Callable[[Collection[str]], bool] = lambda names: True,
    ) -> None:
        self.config = config
        self.policy: ChainPolicy = CHAIN_POLICIES.find(config.policy)
        self.target = target
        self.quoters = frozenset(quoters)
        self._fit_together = cache(fit_together)
        absent = [name for name in config.chain or () if name not in names]
        if absent:  # the pool has left it out
            raise ConfigError("scheduler.chain", f"{absent[0]!r} cannot be served")
        if config.chain is not None and not self.fit(config.chain):
            raise ConfigError("scheduler.chain", NO_ROOM)
        chains = candidate_chains(names, parameters, target, LONGEST_CHAIN)
        # Text drafters before an intermediate brought less than predicted: no such chains.
        chains = tuple(chain for chain in chains if len(chain) < 3 or parameters[chain[0]])
        self.candidates = tuple(chain for chain in chains if self.fit(chain))
        self._parameters = parameters
        self._only_paths = only_paths
        self._whole_trees = whole_trees

    def choose(
        self,
        snapshot: PerformanceSnapshot,
        workload: Workload,
        models: ModelNames,
        current: ChainDecision | None = None,
        asked: Override = SCHEDULED,
    ) -> ChainDecision:
        """Choose the route of a workload's requests for the next cycles.

        Args:
            snapshot: measured times and acceptances.
            workload: the requests.
            models: models that may be used.
            current: the decision in use, for hysteresis.
            asked: depth and width of the requests' override; None takes the configured ones.
        """
        limits = self.limits(asked)
        now = Situation(
            snapshot=snapshot, workload=workload, models=models, limits=limits, current=current
        )
        return self.policy.choose(self, now)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The models that the policy may choose beside the target, weakest first."""
        chains = self.policy.chains(self)
        names = dict.fromkeys(name for chain in chains for name in chain)
        return tuple(name for name in names if name != self.target)

    def limits(self, asked: Override) -> ShapeLimits:
        """Return the bounds of a draft's shape; None is left open."""
        config, (depth, width) = self.config, asked
        return ShapeLimits(
            depth or config.depth,
            1 if self._only_paths else width or config.width,
            config.nodes,
            whole_trees=self._whole_trees,
        )

    def predict(
        self,
        snapshot: PerformanceSnapshot,
        workload: Workload,
        chain: Chain,
        shape: DraftShape,
        whole: bool = True,
    ) -> Option:
        """Predict the cost of a cycle with this chain and shape.

        If the shape has no number of verified nodes, they are whole trees, or the most valuable
        number of nodes if not `whole`.
        """
        if len(chain) == 1:
            return target_only(snapshot, workload, self.target)
        # A request asked for it: it is predicted even if the policy would not choose it.
        limits = ShapeLimits(
            shape.depth,
            shape.width,
            shape.nodes or None,
            whole_trees=whole and not shape.nodes,
        )
        return OptionGrid(chain, snapshot, workload, limits).best()

    def fit(self, chain: Chain, held: Collection[str] = ()) -> bool:
        return self._fit_together(frozenset((*chain, *held)))

    def quoter(
        self, chain: Chain, decision: ChainDecision, asked: Override, available: Collection[str]
    ) -> str | None:
        """Return the text drafter that may draft in the place of a decision's chain.

        It drafts as deep as it finds something. None where the depth is fixed, or nothing was
        predicted.
        """
        is_open = decision.predicted is not None and self.limits(asked).depth is None
        if not is_open:
            return None
        name = next((name for name, size in self._parameters.items() if not size), None)
        return name if name not in chain and name in available else None

    def may_use(self, chain: Chain, models: ModelNames) -> bool:
        able = all(name in models.available or name == self.target for name in chain)
        return able and (len(chain) == 1 or self.fit(chain, models.held))

    def reachable(self, models: ModelNames) -> list[Chain]:
        return [chain for chain in self.candidates if self.may_use(chain, models)]

    def smallest_pair(self) -> Chain:
        pairs = [
            chain for chain in self.candidates if len(chain) == 2 and self._parameters[chain[0]]
        ]
        return min(pairs, key=lambda chain: self._parameters[chain[0]], default=(self.target,))

    def usable(self, chain: Chain, models: ModelNames) -> Chain:
        able = tuple(name for name in chain if name in models.available or name == self.target)
        return able if self.may_use(able, models) else (self.target,)
