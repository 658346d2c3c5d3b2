"""Shadow evaluation: an idle drafter scores committed tokens, to learn its acceptance.

Models share their noise, so a request's output does not depend on its drafters. One forward of the
drafter over the tokens that it lacks thus shows, for each of them and without the target, whether
its first choice would have been accepted: whether it chooses the same token under the noise of that
position. A forward of a small model over 16 tokens gives as much information as six cycles that
draft with it, and the model has then caught up.

Not here: which drafter is evaluated, and when (`specrouter.routing.shadow_policy`).
"""

import time

import numpy as np

from processors import Contexts, NonFiniteLogits, PrefillProcessor
from specrouter.cycle import Ints, ShadowEvaluation
from specrouter.execution.runtime import Runtime

_WIDTH = 3  # best tokens of each position that are recorded for calibration


class ShadowEvaluator:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._target = runtime.pool.target
        self._manager = runtime.manager
        self._states = runtime.states
        self._rows = runtime.rows
        self._profiler = runtime.profiler
        self._prefill = PrefillProcessor(runtime.settings.prefill_chunk)

    def evaluable(self, model: str, rows: Ints) -> Ints:
        """Return [R]: the output tokens that a drafter can be evaluated on.

        It has not read them yet, and their choice can be repeated.
        """
        if not self._states.is_open(model):
            return np.zeros_like(rows)
        missed = np.minimum(self._states.lag(model, rows), self.repeatable(rows))
        return np.maximum(missed, 0)

    def repeatable(self, rows: Ints) -> Ints:
        """Return [R]: the output tokens whose choice can be repeated."""
        able = self._rows.sampler.can_look_back(rows)
        return np.where(able, self._rows.output_positions(rows), 0)

    def run(self, evaluation: ShadowEvaluation) -> None:
        """Evaluate a drafter on a row for the profiler; raise `StageError` if it fails."""
        name, rows = evaluation.model, np.array([evaluation.row], dtype=np.int64)
        tails = np.minimum(self.evaluable(name, rows), evaluation.tokens)
        if tails[0] <= 0:
            return
        begun = time.perf_counter()
        with self._states.stage(name, rows) as active:
            started, end = time.perf_counter(), int(self._manager.counts[evaluation.row])
            lengths = np.array([end - 1])
            logits = self._prefill.read(active, rows, lengths, tails)
            count = int(tails[0])
            last = int(self._rows.output_positions(rows)[0])
            contexts = Contexts(
                rows=np.repeat(rows, count),
                positions=np.arange(last - count, last),
                depths=np.zeros(count, dtype=np.int64),
                are_past=True,
            )
            ids, log_probs = self._rows.sampler.rank(logits, contexts, _WIDTH)
            stated, drafted = np.exp(log_probs.cpu().numpy()), ids.cpu().numpy()
            self._runtime.record_stage("evaluation", count, started)
            if np.isnan(stated).any():
                raise NonFiniteLogits(name, rows)
        said = self._manager.tokens[evaluation.row, end - count : end]
        sampled = bool(self._rows.sampled(rows)[0])
        key = ((name,), self._target, sampled)
        self._profiler.record_choices(key, stated, drafted == said[:, None])
        self._profiler.record_shadow_evaluation((time.perf_counter() - begun) * 1000)
