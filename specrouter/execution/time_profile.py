"""A short profile of a model's forward times, before it serves requests.

Contract: `profile_model` runs forwards of several sizes on a state of its own, and changes no other
state. Its memory is freed when it returns.

Not here: where profiles are kept (`model_times`), what serving learns (`time_regression`).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from specrouter.cycle import Ints
from specrouter.profile.time_curve import TimeCurve, filled_size
from specrouter.profile.time_regression import TimeSample
from statemgr import ModelState

if TYPE_CHECKING:
    from modelpool.packed_model import PackedModel


# (rows, tokens of each): trees of one request, and batches. Sizes beyond `_SURE_TOKENS` are timed
# while a forward takes at most `_CHEAP` times as long as that of one token.
_SHAPES = (
    *((1, 1), (4, 1), (1, 6), (8, 1), (1, 12), (16, 1), (1, 24)),
    *((16, 2), (16, 3), (16, 4), (16, 8), (16, 16), (16, 32), (16, 64)),
)
_SURE_TOKENS = 64
_CHEAP = 8.0
_LONG_SHAPES = ((4, 4), (4, 16))  # for the slope of attention
_SHORT_SLOTS = 128
_LONG_SLOTS = 2048
_LONG_BYTES = 2**27  # size limit of that state, unless it allows less than twice `_SHORT_SLOTS`
_MOST_ROUNDS = 12
_CHECKED = (1, 6, 16)  # tokens of the forwards that check a kept curve
_CLOSE = 0.8  # least ratio of two times that are taken for the same
_SETTLED = 0.03  # largest relative change of an estimate in a round that ends the profile


def profile_model(
    model: "PackedModel",
    budget_s: float = 2.5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[TimeSample, ...]:
    """Return the times of forwards over 1 to 1024 tokens, for `TimeRegression.profiled`.

    Sizes beyond 64 are timed while they are cheap: decoding gains nothing from a pass that takes
    many times as long as one token's. Every round runs each size once, so that a burst of other
    work affects all sizes alike. Ends when the times have settled, or after the forward during
    which the budget is spent; for a model too slow for one round, the largest sizes are missing.

    Args:
        model: the model to time.
        budget_s: most seconds to use.
        clock: returns seconds.

    Raises:
        torch.OutOfMemoryError: no room for the state, some 128 MiB or that of 3000 tokens.
    """
    until = clock() + budget_s
    with torch.inference_mode():
        trials, larger = _trials(model)
        trials[0].run(clock)  # the first forwards of a model allocate and choose kernels
        for _ in range(_MOST_ROUNDS):
            before = [trial.estimate_ms for trial in trials]
            for trial in trials:
                if clock() >= until and trials[0].times_ms:
                    return _samples(trials)
                trial.times_ms.append(trial.run(clock))
            largest = max(trials, key=lambda trial: trial.tokens)
            while larger and largest.estimate_ms <= _CHEAP * trials[0].estimate_ms:
                if clock() >= until:
                    break
                largest = larger.pop(0)
                largest.run(clock)  # as above
                largest.times_ms.append(largest.run(clock))
                trials.append(largest)
            if _is_settled(before, trials):
                break
    return _samples(trials)


def factor_now(
    curve: TimeCurve, model: "PackedModel", clock: Callable[[], float] = time.perf_counter
) -> float | None:
    """Return a factor that corrects a kept curve; None: its shape is wrong.

    Other work may have slowed the machine while the curve was measured: in all sizes alike, or in
    some. Forwards that are slower than the curve show nothing, because noise only slows. Runs a
    forward of each of some sizes, and a second one if they seem wrong. Takes 0.1 s for a model of
    500M parameters on a CPU.
    """
    with torch.inference_mode():
        short, _ = _trials(model, only=_CHECKED)
        for _ in range(2):
            for trial in short:
                trial.times_ms.append(trial.run(clock))
            factors = [one.estimate_ms / curve.at(one.computed, one.attended) for one in short]
            if min(factors) >= _CLOSE:
                return 1.0
            if min(factors) >= _CLOSE * max(factors):
                return sum(factors) / len(factors)
    return None


@dataclass(kw_only=True)
class _Trial:
    """Forwards of one size: `rows` rows with `queries` tokens each after `cached` others."""

    model: "PackedModel"
    state: ModelState
    rows: int
    queries: int
    cached: int
    attended: float = 0.0
    times_ms: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.rows * self.queries

    @property
    def computed(self) -> int:
        """Tokens of the forward, padding included."""
        return int(filled_size(self.tokens, self.model.sizes))

    @property
    def estimate_ms(self) -> float:
        return min(self.times_ms, default=math.inf)  # noise only slows

    def run(self, clock: Callable[[], float]) -> float:
        """Run one forward; return its milliseconds, with the construction of its view."""
        rows, device = np.arange(self.rows), self.model.device
        # Attention takes the same time over slots with any finite values.
        self._append(0, self.cached)
        ids = torch.arange(self.tokens, device=device) * 7919 % self.model.vocab_size
        _synchronise(self.model)
        started = clock()
        slots, positions = self._append(self.cached, self.queries)
        counts = np.full(self.rows, self.queries)
        view = self.state.view(rows, counts, positions, slots)
        wanted = torch.arange(self.tokens, device=device)
        self.model.forward(ids, torch.from_numpy(positions).to(device), view, wanted)
        _synchronise(self.model)
        elapsed_s = clock() - started
        self.attended = self.model.attend.attended(view)
        self.state.rollback(rows, np.zeros_like(rows))
        return elapsed_s * 1000

    def _append(self, first: int, count: int) -> tuple[Ints, Ints]:
        """Append `count` tokens to each row; return their flat slots and positions."""
        positions = np.tile(np.arange(first, first + count), self.rows)
        rows, counts = np.arange(self.rows), np.full(self.rows, count)
        return self.state.append(rows, counts, np.zeros_like(positions), positions), positions


def _trials(
    model: "PackedModel", only: Sequence[int] | None = None
) -> tuple[list[_Trial], list[_Trial]]:
    """Return the trials that are always run, and those of more tokens, smallest first.

    The first ones have a short context, and two more a long one if memory and model allow it.
    `only`: numbers of tokens; the others, and long contexts, are left out.
    """
    longest = min(_SHORT_SLOTS, model.max_positions)
    rows = max(rows for rows, _ in _SHAPES)
    state = ModelState(model.kv_layers, rows, _SHORT_SLOTS, recurrent=model.recurrent_layers)
    short = [
        _Trial(model=model, state=state, rows=rows, queries=queries, cached=longest - queries)
        for rows, queries in _SHAPES
        if queries < longest and (only is None or rows * queries in only)
    ]
    if only is not None:
        return short, []
    trials = [trial for trial in short if trial.tokens <= _SURE_TOKENS]
    larger = short[len(trials) :]
    most_rows, most_queries = _LONG_SHAPES[-1]
    affordable = max(
        _LONG_BYTES // (most_rows * max(model.kv_bytes_per_token, 1)), 2 * _SHORT_SLOTS
    )
    slots = min(_LONG_SLOTS, affordable, model.max_positions) // _SHORT_SLOTS * _SHORT_SLOTS
    if slots > _SHORT_SLOTS:
        state = ModelState(model.kv_layers, most_rows, slots, recurrent=model.recurrent_layers)
        cached = slots - most_queries
        trials += [
            _Trial(model=model, state=state, rows=rows, queries=queries, cached=cached)
            for rows, queries in _LONG_SHAPES
        ]
    return trials, larger


def _is_settled(before: Sequence[float], trials: Sequence[_Trial]) -> bool:
    """Return whether a round changed no estimate and added no trial; `before`: estimates then."""
    now = [trial.estimate_ms for trial in trials[: len(before)]]
    same = all(abs(a - b) <= _SETTLED * b for a, b in zip(before, now, strict=True))
    return same and len(before) == len(trials)


def _samples(trials: Sequence[_Trial]) -> tuple[TimeSample, ...]:
    return tuple(
        TimeSample(trial.computed, trial.attended, trial.estimate_ms)
        for trial in trials
        if trial.times_ms
    )


def _synchronise(model: "PackedModel") -> None:
    for device in {model.device, *model.layer_devices}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
