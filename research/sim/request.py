"""SimulatedRequest: an engine's request in simulated time, whose tokens have no value."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from specrouter.bench.replay import LoadRequest, ReplayAnswer
from specrouter.request.detokenizer import Detokenizer
from specrouter.request.handle import RequestHandle
from specrouter.request.objective import Objective, with_implied_ttft
from specrouter.request.output import Delta
from specrouter.request.pace import RUN_TOKENS
from specrouter.request.params import SamplingParams
from specrouter.request.running import RunningRequest
from specrouter.request.spec import HandedKV, RequestSpec

Commits = tuple[float, int]  # when tokens came, and how many

NO_TOKEN = -1  # tokens have no value, so a stage ends by its length only


class SimulatedClock:
    """Seconds of a simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _NoText(Detokenizer):
    def __init__(self) -> None:
        self.text, self.stopped_by = "", None

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _SimulatedKV(HandedKV):
    """Keys and values as a number of tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__(())
        self._tokens = tokens

    @property
    def tokens(self) -> int:
        return self._tokens

    def take(self) -> list[Any]:
        self._tokens = 0
        return []


class SimulatedRequest(RunningRequest):
    """A `Pending`. It comes when the clock says.

    Args:
        prefill_ms: of a prompt token alone.
        commits: tokens that it has had elsewhere, since it was first sent.
        kv_tokens: that the target need not read: their keys and values come along.

    Attributes:
        refusal: why it is not served.
    """

    def __init__(
        self,
        number: int,
        request: LoadRequest,
        clock: SimulatedClock,
        prefill_ms: float,
        commits: Sequence[Commits] = (),
        kv_tokens: int = 0,
    ) -> None:
        self.request = request
        self.refusal: str | None = None
        self._run_s = 0.0  # when the run of ten tokens began that it is in
        sent_s, asked = clock(), asked_objective(request)
        prompt_ms = len(request.token_ids) * prefill_ms
        spec = RequestSpec(
            token_ids=request.token_ids,
            generated=(NO_TOKEN,) * sum(count for _, count in commits),
            params=SamplingParams(
                max_new_tokens=request.new_tokens, temperature=request.temperature
            ),
            speculation=request.speculation,
            seed=request.seed,
            objective=asked and with_implied_ttft(asked, prompt_ms),
            arrivals=tuple((came_s - sent_s, count) for came_s, count in commits),
            kv=_SimulatedKV(kv_tokens) if kv_tokens else None,
        )
        handle = RequestHandle(number, lambda: None, lambda delta: None)
        super().__init__(spec, handle, _NoText(), frozenset(), clock)
        self.output_tokens = request.new_tokens

    @property
    def id(self) -> int:
        return self.handle.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.spec.token_ids)

    @property
    def tokens(self) -> int:
        """Of its output so far, earlier attempts' included."""
        return self.committed_tokens - self.prompt_tokens

    @property
    def last_s(self) -> float:
        """When its last tokens came."""
        return self.commits[-1][0]

    @property
    def is_cancelled(self) -> bool:
        return self.handle.is_cancelled

    @property
    def is_done(self) -> bool:
        return self.handle.is_done or self.is_cancelled or self.refusal is not None

    def cancel(self) -> None:
        self.handle.cancel()

    def accept(self, *told: Any, **also: Any) -> Delta:
        before, stages = self.pace.decoded, len(self.pace.stages)
        news = super().accept(*told, **also)
        if self.request.judges_runs:
            self._begin_run(len(told[0]), before, is_new=len(self.pace.stages) < stages)
        return news

    def _begin_run(self, tokens: int, before: int, is_new: bool) -> None:
        """Notes when the run of ten tokens began that it is in now. `before`: tokens of the stage
        that it had; `is_new`: another stage has begun."""
        now_s = self.commits[-1][0]
        begun, begins = before // RUN_TOKENS, (before + tokens) // RUN_TOKENS
        if is_new or len(self.commits) == 1:
            self._run_s = now_s
        elif begins > begun:  # tokens of one commit share its time evenly
            last_s = self.commits[-2][0]
            share = (begins * RUN_TOKENS - before) / tokens
            self._run_s = last_s + share * (now_s - last_s)

    def run_ms(self, now_s: float) -> float | None:
        """Since `decoded` was a multiple of ten; None where no such run is judged."""
        judged = self.request.judges_runs and self.commits
        return (now_s - self._run_s) * 1000 if judged else None

    def answer(self) -> ReplayAnswer:
        error = self.refusal or ("cancelled" if self.is_cancelled else None)
        found = self._metrics("length")
        if found.ttft_ms is None:
            return ReplayAnswer(ttft_ms=None, tpot_ms=None, tokens=0, error=error)
        worst_ms = max(found.tpot_ms_every_10, default=None)
        return ReplayAnswer(
            ttft_ms=found.ttft_ms,
            tpot_ms=found.tpot_ms,
            tokens=self.tokens,
            acceptance_length=found.acceptance_length,
            error=error,
            attained_stages=found.attained_stages,
            worst_run_ms=worst_ms if self.request.judges_runs else None,
        )

    def _attained_stages(self) -> tuple[bool, ...]:
        kept = super()._attained_stages()
        if not self.request.judges_runs:
            return kept
        bounds = [1, *self.pace.ends, self.tokens]
        runs_ms = [self._worst_run_ms(*each) for each in pairwise(bounds)]
        return tuple(
            is_kept if ms is None else ms <= stage.tpot_ms * (1.0 + 1e-9)
            for is_kept, ms, stage in zip(kept, runs_ms, self.request.stages, strict=False)
        )

    def _worst_run_ms(self, began: int, ended: int) -> float | None:
        """Of full runs of ten tokens after `began` of them."""
        counts = np.cumsum([count for _, count in self.commits])
        came_s = [self.commits[0][0], *(at_s for at_s, _ in self.commits)]
        ends = np.interp(np.arange(began, ended + 1, RUN_TOKENS), [1, *counts], came_s)
        return float(np.diff(ends).max() * 1000 / RUN_TOKENS) if len(ends) > 1 else None


def asked_objective(request: LoadRequest) -> Objective | None:
    if not request.has_objective:
        return None
    return Objective(
        tpot_ms=None if request.stages else request.objective_ms,
        ttft_ms=request.ttft_ms,
        slo_class=request.category,
        e2e_ms=request.e2e_ms,
        stages=request.stages,
    )
