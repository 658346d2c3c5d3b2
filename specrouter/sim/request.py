"""SimulatedRequest: a request in simulated time, from being sent to its answer."""

import math
from dataclasses import dataclass, field

from specrouter.request.attainment import attained_stages, stage_ends
from specrouter.request.objective import Stage
from specrouter.sim.replay import Answer, LoadRequest
from specrouter.view import RequestView

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
        commits: when tokens came, and how many; noted for requests with stages.
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
    commits: list[tuple[float, int]] = field(default_factory=list)
    waiting_view: RequestView | None = None
    _stage: int = 0  # that it is in,
    _stage_tokens: int = 1  # tokens before it, the first one included,
    _stage_s: float = math.nan  # and when they were there

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

    def take(self, tokens: int, now_s: float) -> None:
        """What a cycle brought that has ended now."""
        self.cycles += 1
        if not self.tokens:
            self.first_s = self._stage_s = now_s
        self.tokens += tokens
        self.last_s = now_s
        assert self.tokens <= self.request.new_tokens, "no cycle brings more than is asked for"
        if self.request.stages:
            self.commits.append((now_s, tokens))
            ends = stage_ends(self.request.stages, (_NO_TOKEN,) * self.tokens)
            if len(ends) > self._stage:
                self._stage, self._stage_tokens, self._stage_s = len(ends), ends[-1], now_s

    def answer(self) -> Answer:
        error = self.refusal or ("cancelled" if self.is_cancelled else None)
        if not self.tokens:
            return Answer(None, None, 0, error=error)
        tpot_ms = None
        if self.tokens > 1:
            tpot_ms = (self.last_s - self.first_s) * 1000 / (self.tokens - 1)
        ttft_ms = (self.first_s - self.sent_s) * 1000
        accepted = self.tokens / self.cycles
        return Answer(ttft_ms, tpot_ms, self.tokens, accepted, error, self._attained_stages())

    def _attained_stages(self) -> tuple[bool, ...]:
        stages = self.request.stages
        came_ms = [at_s * 1000 for at_s, count in self.commits for _ in range(count)]
        return attained_stages(stages, stage_ends(stages, (_NO_TOKEN,) * self.tokens), came_ms)
