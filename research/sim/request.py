"""SimulatedRequest: a request in simulated time, from being sent to its answer."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from specrouter.bench.replay import Answer, LoadRequest
from specrouter.request.attainment import RUN_TOKENS, attained_stages, stage_ends
from specrouter.request.objective import Stage
from specrouter.view import RequestView

Commits = tuple[float, int]  # when tokens came, and how many

_NO_TOKEN = -1  # tokens have no value here, so a stage ends by its length only


@dataclass(eq=False)
class SimulatedRequest:
    """A `Pending`; times are in seconds of the simulation.

    Attributes:
        row: None while it waits.
        reserve_tokens: KV tokens that it needs at most.
        tier: that policies are told of it: its category, if it has an objective.
        tokens: of its output so far; `cycles`: that brought them.
        is_declined: policies were told that its objectives will not be attained.
        is_promised: it was given a row to attain them.
        commits: when tokens came, and how many.
        kv_tokens: that the target need not read, while it waits: their keys and values come along.
        waiting_view: of it before it ran, which does not change.
        refusal: why it is not served.
    """

    id: int
    request: LoadRequest
    sent_s: float
    refusal: str | None = None
    row: int | None = None
    tokens: int = 0
    cycles: int = 0
    first_s: float = math.nan
    last_s: float = math.nan
    is_cancelled: bool = False
    is_declined: bool = False
    is_promised: bool = False
    kv_tokens: int = 0
    commits: list[Commits] = field(default_factory=list)
    waiting_view: RequestView | None = None
    drafts: int = 0
    acceptance: float = 0.0
    _stage: int = 0  # that it is in,
    _stage_tokens: int = 1  # tokens before it, the first one included,
    _stage_s: float = math.nan  # and when they were there
    _run_s: float = math.nan  # when the run of ten tokens began that it is in

    def __post_init__(self) -> None:
        request = self.request
        self.prompt_tokens = len(request.token_ids)
        self.reserve_tokens = self.prompt_tokens + request.new_tokens
        self.tier = request.category if request.has_objective else None

    @property
    def remaining(self) -> int:
        return self.request.new_tokens - self.tokens

    @property
    def is_done(self) -> bool:
        return self.tokens >= self.request.new_tokens or self.is_cancelled or bool(self.refusal)

    @property
    def has_objective(self) -> bool:
        """Whether it came with one."""
        return self.request.has_objective

    @property
    def admission_key(self) -> float:
        return self.sent_s

    def cancel(self) -> None:
        self.is_cancelled = True

    @property
    def tpot_ms(self) -> float | None:
        """The objective of the tokens that come next."""
        stages = self.stages
        return stages[0].tpot_ms if stages else self.request.objective_ms

    @property
    def stages(self) -> tuple[Stage, ...]:
        """That are left, the current one first."""
        return self.request.stages[self._stage :]

    @property
    def decoded(self) -> int:
        """Tokens after the first one, or of the stage that has begun."""
        return self.tokens - self._stage_tokens if self.tokens else 0

    def decode_ms(self, now_s: float) -> float:
        """The time that those took so far."""
        return (now_s - self._stage_s) * 1000 if self.tokens else 0.0

    def run_ms(self, now_s: float) -> float | None:
        """Since `decoded` was a multiple of ten; None where no such run is judged."""
        judged = self.request.judges_runs and self.tokens
        return (now_s - self._run_s) * 1000 if judged else None

    def take(self, tokens: int, now_s: float, drafted: int = 0) -> None:
        """What a cycle brought that has ended now."""
        self.cycles += 1
        if drafted:
            self.drafts += 1
            self.acceptance = min(tokens - 1, drafted) / drafted
        if not self.tokens:
            self.first_s = self._stage_s = self._run_s = now_s
        begun = self.decoded // RUN_TOKENS
        begins = (self.decoded + tokens) // RUN_TOKENS
        if self.tokens and begins > begun:  # tokens of one commit share its time evenly
            share = (begins * RUN_TOKENS - self.decoded) / tokens
            self._run_s = self.last_s + share * (now_s - self.last_s)
        self.tokens += tokens
        self.last_s = now_s
        assert self.tokens <= self.request.new_tokens, "no cycle brings more than is asked for"
        self.commits.append((now_s, tokens))
        if self.request.stages:
            ends = self._stage_ends()
            if len(ends) > self._stage:
                self._stage, self._stage_tokens = len(ends), ends[-1]
                self._stage_s = self._run_s = now_s

    def answer(self) -> Answer:
        error = self.refusal or ("cancelled" if self.is_cancelled else None)
        if not self.tokens:
            return Answer(None, None, 0, error=error)
        tpot_ms = None
        if self.tokens > 1:
            tpot_ms = (self.last_s - self.first_s) * 1000 / (self.tokens - 1)
        ttft_ms = (self.first_s - self.sent_s) * 1000
        accepted = self.tokens / self.cycles
        stages = self._attained_stages()
        worst_ms = self._worst_run_ms(1, self.tokens) if self.request.judges_runs else None
        return Answer(ttft_ms, tpot_ms, self.tokens, accepted, error, stages, worst_ms)

    @property
    def kept_pace(self) -> bool:
        """Did it keep the TPOT of its stages, or its only one?"""
        answer, asked = self.answer(), self.request
        if asked.stages:
            return all(answer.attained_stages)
        pace_ms = answer.worst_run_ms if asked.judges_runs else answer.tpot_ms
        if pace_ms is None or asked.objective_ms is None:
            return True
        return pace_ms <= asked.objective_ms

    def _attained_stages(self) -> tuple[bool, ...]:
        stages, ends = self.request.stages, self._stage_ends()
        came_ms = [at_s * 1000 for at_s, count in self.commits for _ in range(count)]
        kept = attained_stages(stages, ends, came_ms)
        if not self.request.judges_runs:
            return kept
        bounds = [1, *ends, self.tokens]
        runs_ms = [self._worst_run_ms(*each) for each in pairwise(bounds)]
        return tuple(
            is_kept if ms is None else ms <= stage.tpot_ms * (1.0 + 1e-9)
            for is_kept, ms, stage in zip(kept, runs_ms, stages, strict=False)
        )

    def _stage_ends(self) -> tuple[int, ...]:
        return stage_ends(self.request.stages, (_NO_TOKEN,) * self.tokens)

    def _worst_run_ms(self, began: int, ended: int) -> float | None:
        """Of full runs of ten tokens after `began` of them."""
        counts = np.cumsum([count for _, count in self.commits])
        came_s = [self.first_s, *(at_s for at_s, _ in self.commits)]
        ends = np.interp(np.arange(began, ended + 1, RUN_TOKENS), [1, *counts], came_s)
        return float(np.diff(ends).max() * 1000 / RUN_TOKENS) if len(ends) > 1 else None
