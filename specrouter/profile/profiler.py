"""PerformanceProfiler: the scheduler's measurements, learned from the cycles as they run.

Times of passes per model and size of the pack (`perf_model`), the engine's own times, similarities
and acceptances per chain of models (`acceptance`), and outcomes of predictions. Everything ages.
Source: SpecRouter, sections 4.2 and 4.6, Equations 5 and 6.
"""

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pydantic import ConfigDict

from specrouter.profile.acceptance import (
    AcceptanceEstimator,
    Bools,
    Floats,
    Ints,
    JudgedTrees,
    similarity_to_acceptance,
)
from specrouter.profile.evidence import AVERAGE, forget_oldest
from specrouter.profile.outcomes import OutcomeBook
from specrouter.profile.perf_model import PerfModel
from specrouter.profile.snapshot import Mode, Pair, PerformanceSnapshot, TreeKey, load_of
from specrouter.profile.time_regression import TimeRegression
from specrouter.request.params import Chain

_EXPLORATION_MS = 120_000.0  # time of cycles after which spent exploration has faded
# Prior factor of a text drafter's probabilities: greedy texts repeat themselves as often as those
# say, sampled ones of SmolLM2 and Qwen2.5-Coder less often.
_SAMPLED_QUOTES = 0.6
_LEARN_EVERY = 3  # cycles between learning times of known sizes, since learning takes time too


@dataclass(kw_only=True)
class EngineStatistics:
    """Totals since the start."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)  # for the API's schema

    cycles: int = 0
    """Decoding cycles in which anything ran."""
    cycle_ms: float = 0.0
    """Time of these cycles, in milliseconds."""
    model_ms: Mapping[str, float] = field(default_factory=dict)
    """The part of `cycle_ms` in each model's forward passes."""
    logits_ms: float = 0.0
    """The part of `cycle_ms` in the work on logits and drafts outside of passes."""
    forwards: Mapping[str, int] = field(default_factory=dict)
    """Forward passes of each model."""
    pack_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens that each model has read in them."""
    committed_tokens: int = 0
    """Output tokens of all requests."""
    target_passes: int = 0
    """Number of requests in each cycle that the target verified, summed over cycles."""
    switches: int = 0
    """Number of changes of the chain or of the trees' shape."""
    shadow_evaluations: int = 0
    """Number of shadow evaluations of idle drafters."""
    exploration_ms: float = 0.0
    """Time of shadow evaluations, in milliseconds."""
    control_ms: float = 0.0
    """The rest of `cycle_ms`: planning, delivery and learning."""


@dataclass(kw_only=True)
class PerformanceProfiler:
    """The profiler. Thread-safe: the engine records, any thread takes snapshots."""

    parameters: Mapping[str, int]
    is_learning: bool = True  # else only totals are recorded
    _cycle: int = 0
    # The cycle of each model's last pass that was learned from, or in which it was loaded.
    _used: dict[str, int] = field(default_factory=dict)
    _times: PerfModel = field(default_factory=PerfModel)
    _similarity: dict[Pair, float] = field(default_factory=dict)
    _trees: dict[TreeKey, AcceptanceEstimator] = field(default_factory=dict)
    _outcomes: OutcomeBook = field(default_factory=OutcomeBook)
    _totals: EngineStatistics = field(default_factory=EngineStatistics)
    _model_ms: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _forwards: Counter[str] = field(default_factory=Counter)
    _pack_tokens: Counter[str] = field(default_factory=Counter)
    _before_ms: float = 0.0  # in passes and on logits, up to the end of the last cycle
    # Time of the cycles that were learned from, and of shadow evaluations in it, older ones faded:
    # an unspent budget does not last long, nor does an overspent one.
    _learning_ms: float = 0.0
    _explored_ms: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # A text drafter is never loaded: it counts as used from the start.
        self._used.update((name, 0) for name, size in self.parameters.items() if not size)

    def learn_curve(self, model: str, times: TimeRegression, sizes: tuple[int, ...] = ()) -> None:
        """Take over times of a profile at load, or of an earlier process; passes refine them.

        `sizes`: sizes that the model's passes are filled up to.
        """
        with self._lock:
            self._times.learn(model, times, sizes)
            self._used.setdefault(model, self._cycle)

    def record_forward(
        self, model: str, tokens: int, attended: float, elapsed_ms: float, times: int = 1
    ) -> None:
        """Record `times` passes of one size that took `elapsed_ms` in the mean.

        `attended`: pairs of query and slot, see `TimeCurve`.
        """
        with self._lock:
            if self.is_learning:
                self._used[model] = self._cycle
            self._model_ms[model] += elapsed_ms * times
            self._forwards[model] += times
            self._pack_tokens[model] += tokens * times
            self._times.record(model, tokens, attended, elapsed_ms)

    def record_stage(self, stage: str, places: int, elapsed_ms: float, times: int = 1) -> None:
        """Record the engine's own time around passes; see `PerformanceSnapshot.stages`.

        `times`: how often that was done in `elapsed_ms`.
        """
        with self._lock:
            self._totals.logits_ms += elapsed_ms
            self._times.record_stage(stage, places, elapsed_ms / times)

    def record_cycle(
        self, elapsed_ms: float, committed: int, requests: int, stage: str | None = None
    ) -> None:
        """End a cycle that committed so many tokens for so many requests.

        `stage`: entry of `PerformanceSnapshot.stages` for the control plane's time; None if the
        cycle was not typical.
        """
        with self._lock:
            totals = self._totals
            spent_ms = sum(self._model_ms.values()) + totals.logits_ms
            control_ms = max(0.0, elapsed_ms - (spent_ms - self._before_ms))
            self._before_ms = spent_ms
            totals.cycles += 1
            totals.cycle_ms += elapsed_ms
            totals.control_ms += control_ms
            totals.committed_tokens += committed
            totals.target_passes += requests
            if stage is not None:
                self._times.record_stage(stage, requests, control_ms)
            self._times.end_cycle(self.is_learning, self._cycle % _LEARN_EVERY != 0)
            if self.is_learning:
                fade = math.exp(-elapsed_ms / _EXPLORATION_MS)
                self._learning_ms = self._learning_ms * fade + elapsed_ms
                self._explored_ms *= fade

    def record_switches(self, count: int) -> None:
        with self._lock:
            self._totals.switches += count

    def record_shadow_evaluation(self, elapsed_ms: float) -> None:
        with self._lock:
            self._totals.shadow_evaluations += 1
            self._totals.exploration_ms += elapsed_ms
            self._explored_ms += elapsed_ms

    def record_outcome(
        self,
        chain: Chain,
        requests: int,
        predicted_ms: float,
        elapsed_ms: float,
        expected: float,
        committed: float,
        sampled: Mode = True,
    ) -> None:
        """Record the outcome of one cycle of a chain: its time, and tokens beyond the target's own.

        Outcomes are kept apart by the number of requests, since the errors of the cycle's model
        differ with it, and by the predicted mode, whose acceptances the expected tokens are made
        from. The prediction is the plain one, without corrections by earlier outcomes.

        Raises:
            ArithmeticError: a number is not finite; it is not learned, since sums would keep it for
                ever.
        """
        if not self.is_learning:
            return
        if not math.isfinite(predicted_ms + elapsed_ms + expected + committed):
            raise ArithmeticError(f"the outcome of {chain} holds what is no number")
        with self._lock:
            key = chain, load_of(requests), sampled
            log_error = None
            if predicted_ms > 0.0:
                slow = self._times.slowdown * predicted_ms
                log_error = math.log(max(elapsed_ms, 1e-3) / slow)
            self._outcomes.record(key, self._cycle, log_error, expected, committed)

    def begin_cycle(self) -> None:
        """Count a cycle, the unit of time of all ageing."""
        with self._lock:
            self._cycle += self.is_learning

    def record_similarity(self, pair: Pair, total_variation: float) -> None:
        if not self.is_learning or not math.isfinite(total_variation):
            return  # an average would never forget it
        with self._lock:
            score = 1.0 - total_variation
            known = self._similarity.get(pair, score)
            self._similarity[pair] = known + AVERAGE * (score - known)

    def record_trees(self, key: TreeKey, trees: JudgedTrees) -> None:
        """Record a verifier's result for a chain's trees; see `AcceptanceEstimator.record`."""
        if not self.is_learning:
            return
        with self._lock:
            self._estimator(key).record(trees, self._cycle)
            self._keep_numbers(key)

    def record_choices(self, key: TreeKey, stated: Floats, accepted: Bools) -> None:
        """Record what proposers would have drafted; see `AcceptanceEstimator.record_choices`."""
        if not self.is_learning:
            return
        with self._lock:
            self._estimator(key).record_choices(stated, accepted, self._cycle)
            self._keep_numbers(key)

    def _estimator(self, key: TreeKey) -> AcceptanceEstimator:
        if key not in self._trees:
            forget_oldest(self._trees, lambda known: known.last_cycle)
        return self._trees.setdefault(key, self._untaught(key))

    def _untaught(self, key: TreeKey) -> AcceptanceEstimator:
        proposers, _, sampled = key
        quotes = not self.parameters.get(proposers[0], 1)
        return AcceptanceEstimator(quotes, _SAMPLED_QUOTES if quotes and sampled else 1.0)

    def _keep_numbers(self, key: TreeKey) -> None:
        """Forget an estimator whose numbers are not finite: an average would keep them."""
        if not self._trees[key].is_finite:
            del self._trees[key]
            raise ArithmeticError(f"the acceptances of {key} are no numbers")

    def worth(self, key: TreeKey, parents: Ints, depths: Ints, log_probs: Floats) -> Floats:
        """Return the chance [B, n] that drafted nodes are on the verifier's walk."""
        with self._lock:
            estimator = self._trees.get(key)
        return (estimator or _UNTAUGHT).worth(parents, depths, log_probs)

    def path_worth(self, key: TreeKey, stated: Sequence[float]) -> list[float]:
        """Return the chances that a path's tokens are on the verifier's walk.

        `stated` are the probabilities of each token after those before it.
        """
        with self._lock:
            known = self._trees.get(key) or self._untaught(key)
            return known.path_worth(stated)

    def snapshot(self) -> PerformanceSnapshot:
        with self._lock:
            promised = {
                (*pair, mode): similarity_to_acceptance(score)
                for pair, score in self._similarity.items()
                # A text drafter cannot be evaluated while it is idle. It has no entry, so that the
                # higher prior makes it be tried again when its evidence has faded.
                if self.parameters.get(pair[0], 1)
                for mode in (False, True)
            }
            return PerformanceSnapshot(
                times=MappingProxyType(self._times.models()),
                means_ms=MappingProxyType(self._times.means_ms()),
                parameters=self.parameters,
                similarity=MappingProxyType(dict(self._similarity)),
                trees=MappingProxyType(
                    {key: known.snapshot(self._cycle) for key, known in self._trees.items()}
                ),
                promised_alpha=MappingProxyType(promised),
                stages=MappingProxyType(self._times.stages()),
                outcomes=MappingProxyType(self._outcomes.known(self._cycle)),
                usual_outcomes=MappingProxyType(self._outcomes.usual(self._cycle)),
                idle_cycles=MappingProxyType(
                    {name: self._cycle - used for name, used in self._used.items()}
                ),
                machine=self._times.slowdown,
                learning_ms=self._learning_ms,
                explored_share=self._explored_ms / max(self._learning_ms, 1e-9),
                is_learning=self.is_learning,
            )

    def spent_ms(self) -> Mapping[str, float]:
        """Return the time of each model's passes since the start."""
        with self._lock:
            return dict(self._model_ms)

    def statistics(self) -> EngineStatistics:
        with self._lock:
            return replace(
                self._totals,
                model_ms=dict(self._model_ms),
                forwards=dict(self._forwards),
                pack_tokens=dict(self._pack_tokens),
            )


_UNTAUGHT = AcceptanceEstimator()
