"""ModelChainScheduler: which chain of models drafts and verifies next.

A chain runs from the drafter through intermediate verifiers to the target. The scheduler predicts
for every candidate the effective time of a committed token and takes the least (SpecRouter,
section 4.2, Equation 7, Algorithm 1). The target alone is always a candidate.

A drafter that has not been used for long is tried for one cycle now and then.

- `adaptive`: measured curves T(n), and acceptance rates as observed, or derived from the
  similarity where there is little to observe. Intermediates extend what they accept.
- `paper`: the published formula: every level costs W times the model's time per token, and the
  acceptance rate is a function of the similarity alone.
- `static`: one configured chain. `target-only`: no speculation.

Decisions are pure functions of a snapshot: no clock, no randomness, no tensors.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from specrouter.config import SchedulerConfig
from specrouter.params import MAX_TREE_TOKENS
from specrouter.profiler import PerformanceSnapshot, TimeCurve

Chain = tuple[str, ...]

# What is assumed of a pair before it was tried; high, so that it will be.
_UNTRIED_ALPHA = 0.75
_PRIOR_TOKENS = 20.0  # observations that weigh as much as the prior
_UNTRIED_SPEED = 0.02  # least share of the target's time that an untried model is assumed to take
# A chain in use is kept unless another promises to be faster by this factor: predictions jitter.
_HYSTERESIS = 0.97


@dataclass(frozen=True)
class ChainDecision:
    """What was chosen, and what each alternative was predicted to cost, in ms per token."""

    chain: Chain
    depth: int
    width: int
    hard_rejection: bool
    predicted_ms: Mapping[Chain, float]
    is_probe: bool = False  # taken once to learn what became of a model, not for its speed


def candidate_chains(
    names: Sequence[str], parameters: Mapping[str, int], target: str
) -> tuple[Chain, ...]:
    """All chains in which every model is larger than the one before, the target's own included.

    `names` are weakest first. Models of one size, such as specialists, never verify each other.
    """
    others = [name for name in names if name != target]
    chains = [
        (*drafters, target)
        for length in range(len(others) + 1)
        for drafters in itertools.combinations(others, length)
    ]
    return tuple(
        chain
        for chain in chains
        if all(parameters[a] < parameters[b] for a, b in itertools.pairwise(chain[:-1]))
    )


class ModelChainScheduler:
    """Keeps the candidates; everything else comes with the snapshot."""

    def __init__(
        self,
        config: SchedulerConfig,
        names: Sequence[str],
        parameters: Mapping[str, int],
        target: str,
    ) -> None:
        self.config = config
        self.target = target
        self.candidates = candidate_chains(names, parameters, target)

    def choose(
        self,
        snapshot: PerformanceSnapshot,
        requests: int,
        available: Collection[str],
        current: Chain | None,
        depth: int | None = None,
        width: int | None = None,
    ) -> ChainDecision:
        """The chain for `requests` decoding together.

        Args:
            available: models that may be used; the target always may.
            current: the chain of the last cycle, for hysteresis.
            depth, width: of one request's override; None takes the configured ones.
        """
        policy, depth = self.config.policy, depth or self.config.depth
        width = fitting_width(depth, width or self.config.width)
        hard = policy == "paper"
        if policy == "target-only":
            return ChainDecision((self.target,), depth, width, hard, {})
        if policy == "static":
            assert self.config.chain is not None
            return ChainDecision(self._usable(self.config.chain, available), depth, width, hard, {})
        predicted = {
            chain: predict_paper(chain, snapshot, requests, depth)
            if hard
            else predict_adaptive(chain, snapshot, requests, depth, width)
            for chain in self.candidates
            if all(name in available or name == self.target for name in chain)
        }
        probe = self._probe(snapshot, predicted)
        if probe is not None:
            return ChainDecision(probe, depth, width, hard, predicted, is_probe=True)
        best = min(predicted, key=lambda chain: predicted[chain])
        if current in predicted and predicted[best] > _HYSTERESIS * predicted[current]:
            best = current
        return ChainDecision(best, depth, width, hard, predicted)

    def _probe(
        self, snapshot: PerformanceSnapshot, predicted: Mapping[Chain, float]
    ) -> Chain | None:
        """The shortest chain of a drafter that has not been used for long."""
        stale = [chain for chain in predicted if len(chain) == 2 and chain[0] in snapshot.stale]
        return stale[0] if stale else None

    def _usable(self, chain: Chain, available: Collection[str]) -> Chain:
        return tuple(name for name in chain if name in available or name == self.target)


def predict_adaptive(
    chain: Chain, snapshot: PerformanceSnapshot, requests: int, depth: int, width: int = 1
) -> float:
    """Milliseconds per committed token of one request.

    cost  = depth * T_1(B * width) + sum over verifiers j of T_j(B * (nodes_j + 1))
    offer = depth for the first verifier, then what the one before accepted plus its own choice.
    nodes = offer in trees of width 1; wider ones are offered whole by every level.
    """
    times = [_curve(name, chain[-1], snapshot) for name in chain]
    if len(chain) == 1:
        return times[0].at(requests)
    cost, offered = depth * times[0].at(requests * width), float(depth)
    for index in range(1, len(chain)):
        nodes = offered if width == 1 else float(depth * width)
        cost += times[index].at(requests * (nodes + 1))
        alpha = acceptance_rate(chain[index - 1], chain[index], snapshot, width)
        offered = expected_accepted(alpha, offered) + 1
    return cost / offered


def fitting_width(depth: int, width: int) -> int:
    """The width, or the most with which a tree of this depth stays within MAX_TREE_TOKENS."""
    return max(1, min(width, MAX_TREE_TOKENS // depth))


def predict_paper(chain: Chain, snapshot: PerformanceSnapshot, requests: int, depth: int) -> float:
    """Equation 7 as published: W * T_1, then W * T_j times the chance that level j is reached.

    Expected tokens: those that every level accepts, plus the target's own.
    """
    times = [_curve(name, chain[-1], snapshot).at(requests) for name in chain]
    if len(chain) == 1:
        return times[0]
    cost, reached, alpha = depth * times[0], 1.0, 1.0
    for index in range(1, len(chain)):
        cost += depth * times[index] * reached
        step = similarity_to_acceptance(_similarity(chain[index - 1], chain[index], snapshot))
        alpha *= step
        reached *= step
    return cost / (expected_accepted(alpha, depth) + 1)


def expected_accepted(alpha: float, offered: float) -> float:
    """`alpha + alpha^2 + ... + alpha^offered`; `offered` need not be whole."""
    if alpha >= 1.0:
        return offered
    return float(alpha * (1.0 - alpha**offered) / (1.0 - alpha))


def similarity_to_acceptance(similarity: float) -> float:
    """(1 - TV) / (1 + TV), the acceptance that shared noise guarantees (arXiv 2408.07978)."""
    return similarity / (2.0 - similarity)


def acceptance_rate(
    proposer: str, verifier: str, snapshot: PerformanceSnapshot, width: int = 1
) -> float:
    """Observed acceptances, blended with what the similarity promises by weight of evidence.

    What the similarity says of one proposal is a lower bound for several.
    """
    similarity = snapshot.similarity.get((proposer, verifier))
    prior = _UNTRIED_ALPHA if similarity is None else similarity_to_acceptance(similarity)
    seen = snapshot.acceptance.get((proposer, verifier, width))
    if seen is None:
        return prior
    total = seen.evidence + _PRIOR_TOKENS
    return (seen.rate * seen.evidence + prior * _PRIOR_TOKENS) / total


def _similarity(proposer: str, verifier: str, snapshot: PerformanceSnapshot) -> float:
    untried = 2 * _UNTRIED_ALPHA / (1 + _UNTRIED_ALPHA)  # inverse of similarity_to_acceptance
    return snapshot.similarity.get((proposer, verifier), untried)


def _curve(name: str, target: str, snapshot: PerformanceSnapshot) -> TimeCurve:
    """A model's curve; of an untried one the target's, scaled by the number of parameters."""
    if name in snapshot.times:
        return snapshot.times[name]
    share = snapshot.parameters[name] / snapshot.parameters[target]
    known = snapshot.times.get(target, TimeCurve(((1, 1.0),)))
    scale = 1.0 if name == target else max(share, _UNTRIED_SPEED)
    return TimeCurve(tuple((tokens, ms * scale) for tokens, ms in known.points))
