"""The policy `paper`: SpecRouter's chains as they were published.

Every level costs W times the model's time, which is one moving average; the acceptance rate is a
function of the similarity alone; the chain is chosen in every cycle. Intermediates pass on their
own next token, too; in section 4.3 they pass on only what they accepted.
Source: SpecRouter, section 4.2, Equation 7, Algorithm 1.
"""

from itertools import pairwise

from specrouter.profile.acceptance import UNTRIED_ALPHA, similarity_to_acceptance
from specrouter.profile.cycle_times import curve_of
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.routing.chain_policy import CandidateChains, ChainPolicy, Situation
from specrouter.view import ChainDecision


class Paper(ChainPolicy):
    learns = decides_every_cycle = True

    def choose(self, pool: CandidateChains, now: Situation) -> ChainDecision:
        shape = self.shape(now.limits)
        predicted = {
            chain: predict_paper(chain, now.snapshot, shape.depth)
            for chain in pool.reachable(now.models)
        }
        best = min(predicted, key=lambda chain: predicted[chain])
        return ChainDecision(
            chain=best,
            shape=shape,
            predicted_ms=predicted,
            reason="least by Equation 7",
        )


PAPER = Paper()


def predict_paper(chain: Chain, snapshot: PerformanceSnapshot, depth: int) -> float:
    """ms per token: W * T_1, then W * T_j times the chance that level j is reached, over the tokens
    that every level accepts and the target's own.

    T_i is one moving average, whatever the size of the forwards; of an untried model it goes by the
    parameters.
    """
    target = chain[-1]
    times = [snapshot.means_ms.get(name, curve_of(snapshot, name, target).at(1)) for name in chain]
    if len(chain) == 1:
        return times[0]
    cost, reached = depth * times[0], 1.0
    for time_ms, pair in zip(times[1:], pairwise(chain), strict=True):
        cost += depth * time_ms * reached
        similarity = snapshot.similarity.get(pair)
        reached *= UNTRIED_ALPHA if similarity is None else similarity_to_acceptance(similarity)
    return cost / sum(reached**level for level in range(depth + 1))
