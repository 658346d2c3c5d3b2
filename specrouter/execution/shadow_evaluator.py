"""ShadowEvaluator: how well an idle drafter would have drafted, along committed text.

Noise is shared, and a request has one output, whoever drafts it. So whether a drafter's first
choice would have been accepted can be told for every token that is there, by one forward of the
drafter over what it has missed and without the target: the token is either what the drafter itself
chooses under the noise of that place, or it is not. A forward of a small model over sixteen tokens
says as much as six cycles that draft with it, and has it caught up should it be chosen.

Not here: who is evaluated, and when (`specrouter.routing.shadow_policy`).
"""

import time

import numpy as np

from processors import Contexts, NonFiniteLogits, PrefillProcessor
from specrouter.cycle import Ints, ShadowEvaluation
from specrouter.execution.runtime import Runtime

_WIDTH = 3  # best tokens of each place that calibration learns of


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
        """[R] output tokens that a drafter could be evaluated on: it has not read them yet, and
        what was chosen there can be chosen again."""
        if not self._states.is_open(model):
            return np.zeros_like(rows)
        missed = np.minimum(self._states.lag(model, rows), self.repeatable(rows))
        return np.maximum(missed, 0)

    def repeatable(self, rows: Ints) -> Ints:
        """[R] output tokens whose choice could be made again."""
        able = self._rows.sampler.can_look_back(rows)
        return np.where(able, self._rows.output_positions(rows), 0)

    def run(self, evaluation: ShadowEvaluation) -> None:
        """Tells the profiler. Raises `StageError` where the drafter fails."""
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
