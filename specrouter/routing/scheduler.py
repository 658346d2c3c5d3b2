"""ModelChainScheduler: which chain of models drafts and verifies next, and with what trees.

A chain runs from the drafter through intermediate verifiers to the target. The scheduler predicts
for every candidate, with every shape of tree, the effective time of a committed token and takes
the least (SpecRouter, section 4.2, Equation 7, Algorithm 1). The target alone is always a
candidate, so a chain that does not pay is not used.

- `adaptive`: measured curves T(n) and learned acceptances over chain x depth x width x nodes
  (`prediction`), and hysteresis.
- `paper`: the published formula: every level costs W times the model's time, one moving average,
  and the acceptance rate is a function of the similarity alone; hard rejection; decided in every
  cycle.
- `specustream`: the smallest drafter or a configured chain; each request sets its own depth
  (`specrouter.routing.specustream`).
- `static`: one configured chain. `ssd-smallest`: the smallest drafter and the target.
  `target-only`: no speculation.

Decisions are pure functions of a snapshot: no clock, no randomness, no tensors.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from modelpool.errors import ConfigError
from specrouter.config import SchedulerConfig
from specrouter.config.scheduler import STREAMED
from specrouter.cycle import DraftShape, Option
from specrouter.profile.cycle_times import Workload
from specrouter.profile.paper_prediction import predict_paper
from specrouter.profile.prediction import Limits, OptionGrid, acceptance_rate, target_only
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.routing.specustream import MOST_DEPTH, SpecuStream
from specrouter.slo.tree_shape import fitting_width
from specrouter.view import SCHEDULED, ChainDecision, Override

LONGEST_CHAIN = 3  # models of one that is chosen; one that somebody names may be longer
# Of longer chains than pairs, those are looked at that begin with one of so many drafters, whose
# pairs promise most, and go on with one of so many intermediates that the target accepts most of.
_PROMISING = 4
NO_ROOM = "pool.max_loaded_models or pool.memory_limit_mb leaves no room for its models at once"
FIXED_DEPTH = 4  # of policies that do not choose it, where the configuration is silent
# What is in use is kept unless something else promises to be faster by this factor: predictions
# jitter, and a change of chain costs the catching up of a drafter.
_HYSTERESIS = 0.96
_WORTH_IT = 0.97  # of target-only's time: what speculation must promise to be worth its risk
# What a model must promise that never ran: to load it takes seconds, and to read all prompts.
_WORTH_LOADING = 0.9


@dataclass(frozen=True)
class Models:
    """Which models requests may be routed through.

    Attributes:
        available: that may be used; the target always may.
        held: that other requests of the cycle draft with, beside which a chain must have room.
    """

    available: Collection[str]
    held: frozenset[str] = frozenset()


def candidate_chains(
    names: Sequence[str],
    parameters: Mapping[str, int],
    target: str,
    longest: int | None = None,
) -> tuple[Chain, ...]:
    """All chains in which every model is larger than the one before, the target's own included.

    `names` are weakest first. Models of one size, such as specialists, never verify each other.
    There are exponentially many unless `longest` limits their models.
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
    """Keeps the candidates; everything else comes with the snapshot.

    Args:
        only_paths: trees of width 1 (`engine.exact: strict`).
        rejection: whole drafts of width 1, without selection: what rejection
            sampling draws must not depend on what was drawn.
        whole_trees: the target verifies all that was drafted.
        fit_together: whether models can be in memory at once. Chains of which not all members can
            would have one evicted for another in every cycle.

    Raises:
        ConfigError: for a configured chain that does not fit, or has a model that is not there;
            names the field.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        names: Sequence[str],
        parameters: Mapping[str, int],
        target: str,
        only_paths: bool = False,
        rejection: bool = False,
        whole_trees: bool = False,
        fit_together: Callable[[Collection[str]], bool] = lambda names: True,
    ) -> None:
        self.config = config
        self.target = target
        self._fit_together = cache(fit_together)
        absent = [name for name in config.chain or () if name not in names]
        if absent:  # the pool has left it out
            raise ConfigError("scheduler.chain", f"{absent[0]!r} cannot be served")
        if config.chain is not None and not self.fit(config.chain):
            raise ConfigError("scheduler.chain", NO_ROOM)
        chains = candidate_chains(names, parameters, target, LONGEST_CHAIN)
        # Quotations read by an intermediate first have promised more than they brought.
        chains = tuple(chain for chain in chains if len(chain) < 3 or parameters[chain[0]])
        self.candidates = tuple(chain for chain in chains if self.fit(chain))
        self._parameters = parameters
        self._only_paths = only_paths or rejection
        self.verifies_whole = rejection  # no selector is asked
        self._whole_trees = whole_trees or rejection

    def choose(
        self,
        snapshot: PerformanceSnapshot,
        workload: Workload,
        models: Models,
        current: ChainDecision | None = None,
        asked: Override = SCHEDULED,
    ) -> ChainDecision:
        """How the requests of a workload go through the next cycles.

        Args:
            current: what is in use, for hysteresis.
            asked: depth and width of the requests' override; None takes the configured ones.
        """
        policy = self.config.policy
        limits = self.limits(asked)
        if policy == "adaptive":
            return self._adaptive(snapshot, workload, models, current, limits)
        deep = limits.depth or (FIXED_DEPTH if self.stream is None else MOST_DEPTH)
        fixed = ChainDecision(
            (self.target,),
            DraftShape(deep, fitting_width(deep, limits.width or 1), limits.nodes or 0),
        )
        if policy == "target-only":
            return fixed
        if policy == "paper":
            return self._paper(snapshot, models, replace(fixed, hard_rejection=True))
        chain = self.config.chain or self._smallest_pair()
        return replace(fixed, chain=self._usable(chain, models))

    @property
    def decides_every_cycle(self) -> bool:
        """As published, nothing is kept from one cycle to the next."""
        return self.config.policy == "paper"

    @property
    def stream(self) -> SpecuStream | None:
        """Of policies by which each request sets its own depth."""
        if self.config.policy not in STREAMED:
            return None
        return SpecuStream("deltas" if self.config.policy == "specustream" else "acceptances")

    @property
    def drafters(self) -> tuple[str, ...]:
        """The models that the policy may choose beside the target, weakest first."""
        if self.config.policy == "target-only":
            chains: tuple[Chain, ...] = ()
        elif self.config.policy in ("adaptive", "paper"):
            chains = self.candidates
        else:
            chains = (self.config.chain or self._smallest_pair(),)
        names = dict.fromkeys(name for chain in chains for name in chain)
        return tuple(name for name in names if name != self.target)

    def limits(self, asked: Override) -> Limits:
        """What is left open of a cycle's shape."""
        config, (depth, width) = self.config, asked
        return Limits(
            depth or config.depth,
            1 if self._only_paths else width or config.width,
            None if self.verifies_whole else config.nodes,
            whole_trees=self._whole_trees,
        )

    def _paper(
        self,
        snapshot: PerformanceSnapshot,
        models: Models,
        fixed: ChainDecision,
    ) -> ChainDecision:
        predicted = {
            chain: predict_paper(chain, snapshot, fixed.shape.depth)
            for chain in self._reachable(models)
        }
        best = min(predicted, key=lambda chain: predicted[chain])
        return replace(fixed, chain=best, predicted_ms=predicted, reason="least by Equation 7")

    def _adaptive(
        self,
        snapshot: PerformanceSnapshot,
        workload: Workload,
        models: Models,
        current: ChainDecision | None,
        limits: Limits,
    ) -> ChainDecision:
        alone = target_only(snapshot, workload, self.target)
        grids = self._grids(snapshot, workload, models, current, limits)
        ranked = sorted(
            (alone, *(grid.best() for grid in grids.values())),
            key=lambda option: option.ms_per_token,
        )
        promised = _WORTH_LOADING * alone.ms_per_token
        best = next(o for o in ranked if o.ms_per_token <= promised or _has_run(o.chain, snapshot))
        kept = None if current is None else _kept(current, alone, grids)
        if current is None:
            reason = "first decision"
        elif kept is None:
            reason = f"{'>'.join(current.chain)} {self._fate(current.chain, grids, models)}"
        elif best.ms_per_token > _HYSTERESIS * kept.ms_per_token:
            best, reason = kept, "kept: nothing is faster by 4%"
        else:
            gain = kept.ms_per_token / best.ms_per_token - 1.0
            reason = f"faster by {gain:.0%} than {'>'.join(kept.chain)}"
        if best is not alone and best.ms_per_token > _WORTH_IT * alone.ms_per_token:
            best, reason = alone, "speculation promises next to nothing"
        return ChainDecision(
            best.chain,
            best.shape,
            reason=reason,
            predicted=best,
            alternatives=tuple(option for option in ranked if option.chain != best.chain),
            predicted_ms={option.chain: option.ms_per_token for option in ranked},
            grids=grids,
        )

    def _fate(self, chain: Chain, grids: Collection[Chain], models: Models) -> str:
        """Why what was in use cannot be kept."""
        if chain in grids:
            return "can have other trees now"
        fits = self.fit(chain, models.held)
        return "is not available" if fits else "has no room beside what others draft with"

    def _grids(
        self,
        snapshot: PerformanceSnapshot,
        workload: Workload,
        models: Models,
        current: ChainDecision | None,
        limits: Limits,
    ) -> dict[Chain, OptionGrid]:
        """Of the chains that draft and are worth a look."""
        found: dict[Chain, OptionGrid] = {}

        def look_at(chains: Iterable[Chain]) -> None:
            found.update((c, OptionGrid(c, snapshot, workload, limits)) for c in chains)

        def promise(name: str) -> float:
            return float(found[name, self.target].ms_per_token.min())

        def disagreement(name: str) -> float:
            return -acceptance_rate((name,), self.target, snapshot, workload.sampled)

        reachable = self._reachable(models)
        look_at(chain for chain in reachable if len(chain) == 2)
        longer = [c for c in reachable if len(c) > 2]
        first = sorted(dict.fromkeys(c[0] for c in longer), key=promise)[:_PROMISING]
        then = sorted(dict.fromkeys(c[1] for c in longer), key=disagreement)[:_PROMISING]
        in_use = None if current is None else current.chain
        look_at(c for c in longer if c == in_use or (c[0] in first and c[1] in then))
        return found

    def predict(
        self,
        snapshot: PerformanceSnapshot,
        workload: Workload,
        chain: Chain,
        shape: DraftShape,
        whole: bool = True,
    ) -> Option:
        """What one way to run a cycle is predicted to cost.

        Where the shape does not say how many nodes are verified, it is whole trees, or where not
        `whole` as many as promise most.
        """
        if len(chain) == 1:
            return target_only(snapshot, workload, self.target)
        # Somebody asked for it: it is predicted whether or not it would be chosen.
        limits = Limits(
            shape.depth,
            shape.width,
            shape.nodes or None,
            whole_trees=whole and not shape.nodes,
        )
        return OptionGrid(chain, snapshot, workload, limits).best()

    def fit(self, chain: Chain, held: Collection[str] = ()) -> bool:
        """Whether a chain's models can be in memory beside those that are held there."""
        return self._fit_together(frozenset((*chain, *held)))

    def quoter(
        self, chain: Chain, decision: ChainDecision, asked: Override, available: Collection[str]
    ) -> str | None:
        """The member without weights that may draft beside a decision's chain, or is all of its
        drafters, as deep as it finds something. Not where somebody has said how deep, nor without
        predictions, nor where all that is drafted is verified."""
        is_open = decision.predicted is not None and self.limits(asked).depth is None
        if not is_open or decision.hard_rejection or self.verifies_whole:
            return None
        name = next((name for name, size in self._parameters.items() if not size), None)
        is_beside = name not in chain or len(chain) == 2
        return name if is_beside and name in available else None

    def may_use(self, chain: Chain, models: Models) -> bool:
        able = all(name in models.available or name == self.target for name in chain)
        return able and (len(chain) == 1 or self.fit(chain, models.held))

    def _reachable(self, models: Models) -> list[Chain]:
        return [chain for chain in self.candidates if self.may_use(chain, models)]

    def _smallest_pair(self) -> Chain:
        """The smallest drafter that has weights; the target alone in a pool without one."""
        pairs = [
            chain for chain in self.candidates if len(chain) == 2 and self._parameters[chain[0]]
        ]
        return min(pairs, key=lambda chain: self._parameters[chain[0]], default=(self.target,))

    def _usable(self, chain: Chain, models: Models) -> Chain:
        """What of a configured chain may be used."""
        able = tuple(name for name in chain if name in models.available or name == self.target)
        return able if self.may_use(able, models) else (self.target,)


def _has_run(chain: Chain, snapshot: PerformanceSnapshot) -> bool:
    """Whether the time of all drafting models is known; the n-gram drafter is no model."""
    return all(name in snapshot.times or not snapshot.parameters[name] for name in chain[:-1])


def _kept(
    current: ChainDecision, alone: Option, grids: Mapping[Chain, OptionGrid]
) -> Option | None:
    """What is predicted now of what is in use, if it may still be used."""
    if current.chain == alone.chain:
        return alone
    grid = grids.get(current.chain)
    return None if grid is None or current.predicted is None else grid.like(current.predicted)
