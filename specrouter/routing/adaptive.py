"""The policy `adaptive`, which minimises the predicted time of a committed token.

Measured curves T(n) and learned acceptances predict this time for every chain, depth, width and
number of verified nodes (`specrouter.profile.prediction`). The option in use is kept unless another
is clearly better. The target alone is always a candidate, so speculation that does not pay is not
used. Source: SpecRouter, section 4.2 and Algorithm 1, with measured curves in place of its moving
averages.
"""

from collections.abc import Collection, Iterable, Mapping

from specrouter.cycle import Option
from specrouter.profile.prediction import OptionGrid, acceptance_rate, target_only
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.routing.chain_policy import CandidateChains, ChainPolicy, ModelNames, Situation
from specrouter.view import ChainDecision

# A chain longer than a pair is evaluated only if it begins with one of the 4 drafters whose pairs
# are predicted to be fastest, and goes on with one of the 4 intermediates accepted most.
_PROMISING = 4
# The option in use is kept unless another is predicted to be faster by this factor: predictions
# fluctuate, and after a change of chain a drafter has to catch up.
_HYSTERESIS = 0.96
_WORTH_IT = 0.97  # share of the target-only time below which speculation is worth its risk
# The same for a model that never ran: it takes seconds to load, and must read all prompts.
_WORTH_LOADING = 0.9


class Adaptive(ChainPolicy):
    learns = evaluates = True
    default_selection = "goodput"

    def choose(self, pool: CandidateChains, now: Situation) -> ChainDecision:
        snapshot, current = now.snapshot, now.current
        alone = target_only(snapshot, now.workload, pool.target)
        grids = _grids(pool, now)
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
            reason = f"{'>'.join(current.chain)} {_fate(current.chain, grids, pool, now.models)}"
        elif best.ms_per_token > _HYSTERESIS * kept.ms_per_token:
            best, reason = kept, "kept: nothing is predicted to be faster by 4%"
        else:
            gain = kept.ms_per_token / best.ms_per_token - 1.0
            reason = f"predicted to be faster by {gain:.0%} than {'>'.join(kept.chain)}"
        if best is not alone and best.ms_per_token > _WORTH_IT * alone.ms_per_token:
            best, reason = alone, "speculation promises next to nothing"
        return ChainDecision(
            chain=best.chain,
            shape=best.shape,
            reason=reason,
            predicted=best,
            alternatives=tuple(option for option in ranked if option.chain != best.chain),
            predicted_ms={option.chain: option.ms_per_token for option in ranked},
            grids=grids,
        )


ADAPTIVE = Adaptive()


def _fate(chain: Chain, grids: Collection[Chain], pool: CandidateChains, models: ModelNames) -> str:
    """Return the reason why the chain in use cannot be kept."""
    if chain in grids:
        return "can have other trees now"
    fits = pool.fit(chain, models.held)
    return "is not available" if fits else "has no room beside what others draft with"


def _grids(pool: CandidateChains, now: Situation) -> dict[Chain, OptionGrid]:
    """Return the grids of the drafting chains that are evaluated, by chain."""
    found: dict[Chain, OptionGrid] = {}

    def look_at(chains: Iterable[Chain]) -> None:
        found.update((c, OptionGrid(c, now.snapshot, now.workload, now.limits)) for c in chains)

    def promise(name: str) -> float:
        return float(found[name, pool.target].ms_per_token.min())

    def disagreement(name: str) -> float:
        return -acceptance_rate((name,), pool.target, now.snapshot, now.workload.sampled)

    reachable = pool.reachable(now.models)
    if now.limits.depth is None:  # text drafters stand in chains only where the depth is fixed
        reachable = [chain for chain in reachable if chain[0] not in pool.quoters]
    look_at(chain for chain in reachable if len(chain) == 2)
    longer = [c for c in reachable if len(c) > 2]
    first = sorted(dict.fromkeys(c[0] for c in longer), key=promise)[:_PROMISING]
    then = sorted(dict.fromkeys(c[1] for c in longer), key=disagreement)[:_PROMISING]
    in_use = None if now.current is None else now.current.chain
    look_at(c for c in longer if c == in_use or (c[0] in first and c[1] in then))
    return found


def _has_run(chain: Chain, snapshot: PerformanceSnapshot) -> bool:
    """Return whether the times of all drafting models are known; text drafters need none."""
    return all(name in snapshot.times or not snapshot.parameters[name] for name in chain[:-1])


def _kept(
    current: ChainDecision, alone: Option, grids: Mapping[Chain, OptionGrid]
) -> Option | None:
    """Return the new prediction of the option in use, or None if it may not be used any more."""
    if current.chain == alone.chain:
        return alone
    grid = grids.get(current.chain)
    return None if grid is None or current.predicted is None else grid.like(current.predicted)
