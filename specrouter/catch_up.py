"""Catching up: which rows drafters read for, how much in one cycle, and who drafts meanwhile.

A drafter lags behind a row whose prompt it never saw, or whose text others decoded. In one cycle
each model reads at most a chunk of what it lacks, of all rows together, so that no row's long text
holds up the others; a row that still lags by more than `CATCH_UP_TOKENS` decodes without a draft.
The shortest texts come first: those rows draft soonest, and since the target reads no more of new
prompts in a cycle, they cannot keep a long text waiting for longer than it is busy.

Reading delays every request and serves one. It must be earned back by that one:

    requests * time to read  <  tokens that it will draft for * time gained by each

Pure: no clock, no tensors. Not here: the reading (`specrouter.drafter_prefill`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from processors import share_chunk
from specrouter.prediction import (
    Chain,
    Option,
    PerformanceSnapshot,
    Workload,
    curve_of,
    target_only,
)
from specrouter.request import RunningRequest
from specrouter.scheduler import ChainDecision
from statemgr.forward_view import READING_QUERIES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CATCH_UP_TOKENS = 8  # of a row, that a model reads in passing, in the forward that it drafts with


class Reader(Protocol):
    """What must be known of the state."""

    def slots_read(self, rows: Ints) -> int: ...
    def missed(self, model: str, rows: Ints) -> Ints: ...


@dataclass(frozen=True)
class Drafting:
    """Rows of which a chain's models lack nothing when they draft in this cycle: `able`; and those
    for which they have to read before, or for longer than that: `reads`.

    All others are not worth reading for. `tokens`, `ms`: that are read in this cycle, by model, and
    the time that takes.
    """

    able: frozenset[int]
    reads: frozenset[int] = frozenset()
    tokens: Mapping[str, int] = field(default_factory=dict)
    ms: float = 0.0

    def options(
        self, rows: Iterable[int], now: Option, later: Option, alone: Option
    ) -> dict[int, Option]:
        """What each row goes through in a cycle of the option `now`: what is read is read, though
        nobody else drafts in this cycle. `later`: in others."""
        drafts = len(now.chain) > 1
        reads, rest = (now, alone) if drafts else (later, now)
        return {
            row: reads if row in self.reads else now if row in self.able else rest for row in rows
        }


def share_shortest_first(wanted: Ints, chunk: int) -> Ints:
    """[R] of `chunk` tokens, what each row gets that wants so many."""
    order = np.argsort(wanted, kind="stable")
    shares = np.zeros_like(wanted)
    shares[order] = share_chunk(wanted[order], chunk)
    return shares


def reading_ms(
    snapshot: PerformanceSnapshot, model: str, target: str, tokens: Ints, slots: Ints, chunk: int
) -> Floats:
    """[R] of reading so many tokens of each row, chunk by chunk, on the machine as it is now.

    Args:
        slots: [R] that attention reads for the last of them.
    """
    curve = curve_of(snapshot, model, target)
    seen = np.maximum(slots - tokens / 2, 1.0)  # in the mean

    def forward_ms(packed: Floats) -> Floats:
        return curve.many(packed, (packed + READING_QUERIES) * seen)

    whole, rest = np.divmod(tokens.astype(np.float64), chunk)
    ms = whole * forward_ms(np.full(len(tokens), float(chunk)))
    total: Floats = snapshot.machine * (ms + np.where(rest > 0, forward_ms(rest), 0.0))
    return total


def payable_lags(
    snapshot: PerformanceSnapshot,
    workload: Workload,
    target: str,
    rows: Ints,
    remaining: Ints,
    reader: Reader,
    chunk: int,
) -> dict[str, float]:
    """`Workload.lags` without rows that are not read for whatever is drafted: one long text that
    ends soon must not keep all others from their drafter.

    Where nobody is left it is all that there is to read.

    Args:
        rows, remaining: [B] of the workload's requests, and tokens that each may still generate.
    """
    alone_ms = snapshot.machine * target_only(snapshot, workload, target).cycle_ms
    counted, slots = dict(workload.lags), _slots(reader, rows)
    for model, total in workload.lags.items():
        if total < 1.0:
            continue
        missed = reader.missed(model, rows)
        cost_ms = reading_ms(snapshot, model, target, np.maximum(missed, 0), slots, chunk)
        pays = workload.batch * cost_ms < remaining * alone_ms
        pays |= missed <= CATCH_UP_TOKENS
        if pays.any():
            counted[model] = float(np.maximum(missed - 1, 0)[pays].sum())
    return counted


def gain_ms(decision: ChainDecision, machine: float) -> float | None:
    """What a token takes less by the drafts that were decided on; None: nobody predicted it."""
    main = decision.predicted
    if main is None:
        return None
    alone_ms = decision.predicted_ms[main.chain[-1:]]
    return machine * (alone_ms - main.cycle_ms / main.tokens)


class CycleCatchUp:
    """What drafters read beside one cycle.

    Attributes:
        ms: that this takes, of all that was noted so far.
        leaves_out: there are requests for which the chains that were asked for cannot draft yet.

    Args:
        chunk: the most tokens that a model reads.
        snapshot: is asked for where somebody lags.
        requests: all that the cycle delays.
    """

    def __init__(
        self,
        chunk: int,
        snapshot: Callable[[], PerformanceSnapshot],
        reader: Reader,
        requests: int,
    ) -> None:
        self.ms = 0.0
        self.leaves_out = False
        self._chunk = chunk
        self._snapshot = snapshot
        self._reader = reader
        self._requests = requests
        self._read: dict[str, int] = {}  # tokens by model

    def note(self, drafting: Drafting) -> Drafting:
        """The cycle reads this."""
        for name, tokens in drafting.tokens.items():
            self._read[name] = self._read.get(name, 0) + tokens
        self.ms += drafting.ms
        return drafting

    def drafting(
        self,
        chain: Chain,
        requests: Mapping[int, RunningRequest],
        gain_ms: float | None = None,
    ) -> Drafting:
        """Who of the requests, by row, drafts through a chain.

        Args:
            gain_ms: see the function; None: they are caught up whatever that costs.
        """
        rows = np.array(sorted(requests), dtype=np.int64)
        missed = {name: self._reader.missed(name, rows) for name in chain[:-1]}
        lags = {name: np.where(lag > CATCH_UP_TOKENS, lag, 0) for name, lag in missed.items()}
        lagging = sum(lags.values(), np.zeros_like(rows)) > 0
        if not lagging.any():
            return Drafting(frozenset(requests))
        remaining = np.array([requests[row].remaining for row in rows.tolist()])
        pays = ~lagging | (remaining > 1)
        if gain_ms is not None:
            pays &= self._pays(chain[-1], lags, rows, remaining, gain_ms)
        able, tokens, ms = pays.copy(), {}, 0.0
        for name, lag in lags.items():
            wanted = np.where(pays, lag, 0)
            shares = share_shortest_first(wanted, self._chunk - self._read.get(name, 0))
            able &= shares == lag
            tokens[name] = int(shares.sum())
            ms += self._share_ms(name, chain[-1], rows, shares)
        self.leaves_out |= not able.all()
        reads = rows[lagging & pays].tolist()
        return Drafting(frozenset(rows[able].tolist()), frozenset(reads), tokens, ms)

    def at_hand(
        self, options: Mapping[int, Option], requests: Mapping[int, RunningRequest]
    ) -> dict[int, Option]:
        """Of options by row, those that can draft in this cycle."""
        found: dict[int, Option] = {}
        for chain in {option.chain for option in options.values()}:
            those = {row: requests[row] for row in options if options[row].chain == chain}
            able = self.note(self.drafting(chain, those)).able
            found.update((row, options[row]) for row in those if row in able)
        return found

    def _pays(
        self, target: str, lags: Mapping[str, Ints], rows: Ints, remaining: Ints, gain_ms: float
    ) -> Bools:
        """[B] whether what a row lacks can be earned back in the tokens that are left when it has
        been read, after those of the rows before it."""
        slots = _slots(self._reader, rows)
        costs = (
            reading_ms(self._snapshot(), name, target, lag, slots, self._chunk)
            for name, lag in lags.items()
        )
        cost_ms = sum(costs, np.zeros(len(rows)))
        pays = np.ones(len(rows), dtype=np.bool_)
        ahead = dict.fromkeys(lags, 0)  # tokens that are read before
        for at in np.argsort(cost_ms, kind="stable").tolist():
            own = {name: int(lag[at]) for name, lag in lags.items() if lag[at]}
            if not own:
                continue
            cycles = max(-(-(ahead[name] + lag) // self._chunk) for name, lag in own.items())
            drafted = remaining[at] - (cycles - 1)  # it drafts in the last of them
            pays[at] = self._requests * cost_ms[at] < drafted * gain_ms
            if pays[at]:
                ahead.update({name: ahead[name] + lag for name, lag in own.items()})
        return pays

    def _share_ms(self, name: str, target: str, rows: Ints, shares: Ints) -> float:
        """Of reading these tokens in one forward."""
        if not shares.any():
            return 0.0
        slots = np.average(_slots(self._reader, rows), weights=shares)
        packed, seen = np.array([shares.sum()]), np.array([round(float(slots))])
        return float(reading_ms(self._snapshot(), name, target, packed, seen, self._chunk)[0])


def _slots(reader: Reader, rows: Ints) -> Ints:
    """[B] that attention reads for each row."""
    return np.array([reader.slots_read(rows[at : at + 1]) for at in range(len(rows))])
