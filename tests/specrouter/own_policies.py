"""Chain policies of one's own, each with one attribute that the built-in ones do not have."""

from collections.abc import Mapping

from specrouter.routing.chain_policy import CandidateChains, ChainPolicy, RequestDepth, Situation
from specrouter.view import ChainDecision, EngineView


class First(ChainPolicy):
    """The chain of two models that comes first in the pool."""

    def choose(self, pool: CandidateChains, now: Situation) -> ChainDecision:
        pairs = [chain for chain in pool.reachable(now.models) if len(chain) == 2]
        return ChainDecision(chain=(*pairs, (pool.target,))[0], shape=self.shape(now.limits))


class TakesChain(First):
    takes_chain = True


class NeedsChain(TakesChain):
    needs_chain = True


class Paths(First):
    drafts_paths = True


class Deciding(First):
    decides_every_cycle = True


class Measured(First):
    evaluates = True


class Eager(First):
    """Each request drafts as deep as it has cycles behind it, which the policy remembers; no more
    than two together."""

    default_depth = 6

    def depths(self, view: EngineView) -> Mapping[int, RequestDepth]:
        cycles = {one: view.standing.memories.get(one, 0) + 1 for one in view.running.id.tolist()}
        return {each: RequestDepth(levels=n, together=2, memory=n) for each, n in cycles.items()}


FIRST, TAKES_CHAIN, NEEDS_CHAIN, PATHS = First(), TakesChain(), NeedsChain(), Paths()
DECIDING, EAGER, MEASURED = Deciding(), Eager(), Measured()
