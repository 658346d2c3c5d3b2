"""Prefill of drafters and intermediates that lag: at most a chunk per model and cycle.

Contract: `begin` divides each model's chunk among all rows of the cycle, `read` reads a group's
part of it. No model reads more than a chunk here in a cycle, for any number of rows and groups.
When a model reads the end of a prompt, it is compared with the target, which has read it before.

Not here: which rows are to be caught up (`specrouter.routing.catch_up` of the planner).
"""

from collections.abc import Sequence

import numpy as np

from processors import ActiveModel, PrefillProcessor
from specrouter.cycle import (
    CATCH_UP_TOKENS,
    LEAST_CHUNK,
    Bools,
    ChainGroup,
    Ints,
    ModelFailure,
    share_shortest_first,
)
from specrouter.execution.model_comparison import ModelComparison
from specrouter.execution.model_states import StageError
from specrouter.execution.runtime import Runtime


class DrafterPrefill:
    """Prefill by chunks of `prefill_chunk` tokens, or of `LEAST_CHUNK` if that is larger."""

    def __init__(self, runtime: Runtime, comparison: ModelComparison) -> None:
        self._drafters = runtime.drafters
        self._manager = runtime.manager
        self._states = runtime.states
        self._rows = runtime.rows
        self._comparison = comparison
        self._prefill = PrefillProcessor(max(runtime.settings.prefill_chunk, LEAST_CHUNK))
        self._shares: dict[str, Ints] = {}  # by model, [manager.rows] tokens of this cycle
        self._failed: dict[str, ModelFailure] = {}  # models whose shares could not be computed

    def begin(self, groups: Sequence[ChainGroup]) -> None:
        """Divide the models' chunks among the rows of a cycle's groups, which are disjoint."""
        self._shares, self._failed = {}, {}
        parts: dict[str, list[Ints]] = {}
        for group in groups:
            for name in group.chain[:-1]:
                parts.setdefault(name, []).append(group.rows)
        for name, each in parts.items():
            try:
                self._share(name, np.concatenate(each))
            except Exception as error:
                self._failed[name] = ModelFailure(name, error)

    def _share(self, name: str, rows: Ints) -> None:
        wanted = self._wanted(name, rows)
        if wanted.any():
            self._shares[name] = np.zeros(self._manager.rows, dtype=np.int64)
            self._shares[name][rows] = share_shortest_first(wanted, self._prefill.chunk)

    def read(self, group: ChainGroup) -> tuple[list[str], list[ModelFailure]]:
        """Read a group's part; return the models that have read, and those that failed."""
        readers: list[str] = []
        failures = [self._failed[name] for name in group.chain[:-1] if name in self._failed]
        for name in group.chain[:-1]:
            share = self._shares.get(name)
            rows = group.rows[:0] if share is None else group.rows[share[group.rows] > 0]
            if share is None or not len(rows):
                continue
            try:
                with self._states.stage(name, rows) as active:
                    self._read(active, rows, share[rows])
            except StageError as stage:
                failures.append(stage.failure)
            readers.append(name)
        return readers, failures

    def has_read(self, names: Sequence[str], rows: Ints) -> Bools:
        """Return [R]: True for rows that none of the models lags by more than `CATCH_UP_TOKENS`."""
        read = np.ones(len(rows), dtype=np.bool_)
        for name in names:
            read &= self._drafters[name].lag(rows) <= CATCH_UP_TOKENS
        return read

    def _wanted(self, name: str, rows: Ints) -> Ints:
        """Return [R]: the tokens that a model is to read.

        Even a short prompt that is new to it is read here if the model can be compared with the
        target at its end.
        """
        lags = self._drafters[name].lag(rows)
        is_new = lags == self._manager.counts[rows] - 1
        wanted = lags > CATCH_UP_TOKENS
        if is_new.any():
            wanted |= is_new & (self._comparison.prompt_ends(rows)[1] > 0)
        if wanted.any():
            wanted &= self._rows.remaining(rows) > 1  # the last token is always the target's
            wanted[wanted] = ~self._manager.waits(name, rows[wanted])
        return np.where(wanted, lags, 0)

    def _read(self, active: ActiveModel, rows: Ints, left: Ints) -> None:
        """Read `left` tokens of each row, in one forward, or in two if prompts end in between."""
        firsts, lengths = self._comparison.prompt_ends(rows)
        left = np.minimum(left, active.lag(rows))
        while (left > 0).any():
            starts = active.state.lengths(rows)
            ends = starts + left
            ends = np.where((starts < lengths) & (lengths < ends), lengths, ends)
            tails = np.where(ends <= lengths, ends - np.maximum(starts, firsts), 0)
            tails = np.maximum(tails, 0)
            counts = ends - starts
            logits = self._prefill.feed(active, rows, counts, tails)
            if len(logits):
                self._comparison.compare_prompt_ends(active.model.name, rows, ends, tails, logits)
            left = left - counts
