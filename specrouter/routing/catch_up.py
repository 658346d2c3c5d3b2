"""Catching up: which rows drafters read for, how much in one cycle, and who drafts meanwhile.

A drafter lags behind a row whose prompt it never saw, or whose text others decoded. In one cycle
each model reads at most a chunk of what it lacks, of all rows together, so that no row's long text
holds up the others; a row that still lags by more than `CATCH_UP_TOKENS` decodes without a draft.
The shortest texts come first: those rows draft soonest, and since the target reads no more of new
prompts in a cycle, they cannot keep a long text waiting for longer than it is busy.

Reading delays every request and serves one. It must be earned back by that one:

    requests * time to read  <  tokens that it will draft for * time gained by each

Pure: no clock, no tensors. Not here: the reading (`specrouter.execution.drafter_prefill`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrouter.cycle import CATCH_UP_TOKENS, LEAST_CHUNK, Option, share_shortest_first
from specrouter.profile.prediction import Workload, curve_of, target_only
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.view import ChainDecision, RequestView
from statemgr.row_groups import READING_QUERIES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class StateView(Protocol):
    """What must be known of the state."""

    def slots_of(self, rows: Ints) -> Ints: ...
    def missed(self, model: str, rows: Ints) -> Ints: ...


@dataclass(frozen=True)
class Drafting:
    """Rows of which a chain's models lack nothing when they draft in this cycle: `able`; and those
    for which they have to read before, or for longer than that: `reads`.

    All others are not worth reading for.

    Attributes:
        tokens: that are read in this cycle, by model; `ms`: the time that takes.
        able_share: of that, what is read for rows that draft in this cycle, if any do.
        leaves_out: for some of `reads` this cycle does not read to the end.
    """

    able: frozenset[int]
    reads: frozenset[int] = frozenset()
    tokens: Mapping[str, int] = field(default_factory=dict)
    ms: float = 0.0
    able_share: float = 0.0
    leaves_out: bool = False

    def options(
        self, rows: Iterable[int], now: Option, later: Option, alone: Option
    ) -> dict[int, Option]:
        """What each row goes through in a cycle of the option `now`. `later`: in others, for which
        is read though nobody drafts in this one; not for rows that would draft at once."""
        drafts = len(now.chain) > 1
        reads, rest = (now, alone) if drafts else (later, now)
        return {
            row: now if row in self.able else reads if row in self.reads else rest for row in rows
        }


def reading_ms(
    snapshot: PerformanceSnapshot, model: str, target: str, tokens: Ints, slots: Ints, chunk: int
) -> Floats:
    """[R] of reading so many tokens of each row, on the machine as it is now: their shares in
    forwards that they have together, of a chunk each.

    Args:
        slots: [R] that attention reads for the last of them.
    """
    packed = min(chunk, max(1, int(tokens.sum())))
    seen = np.maximum(slots - tokens / 2, 1.0)  # in the mean
    attended = (packed + READING_QUERIES) * seen
    ms = curve_of(snapshot, model, target).many(np.full(len(tokens), float(packed)), attended)
    shares: Floats = snapshot.machine * ms * tokens / packed
    return shares


def payable(
    snapshot: PerformanceSnapshot,
    workload: Workload,
    target: str,
    rows: Ints,
    remaining: Ints,
    reader: StateView,
    chunk: int,
) -> Workload:
    """The workload without requests that no drafter reads for whatever is drafted: a long text that
    ends soon must not keep all others from their drafter. They decode beside.

    Where nobody is left all are counted.

    Args:
        rows, remaining: [B] that decode, of the workload's requests, and tokens that each may still
            generate.
    """
    lagging = [model for model, total in workload.lags.items() if total >= 1.0]
    if not lagging:
        return workload
    alone_ms = snapshot.machine * target_only(snapshot, workload, target).cycle_ms
    slots, counted = reader.slots_of(rows), dict(workload.lags)
    anybody = np.full(len(rows), len(lagging) < len(counted))
    for model in lagging:
        missed = np.maximum(reader.missed(model, rows), 0)
        cost_ms = reading_ms(snapshot, model, target, missed, slots, chunk)
        pays = workload.batch * cost_ms < remaining * alone_ms
        pays |= missed <= CATCH_UP_TOKENS
        anybody |= pays
        if pays.any():
            counted[model] = float(np.maximum(missed - 1, 0)[pays].sum())
    beside = int((~anybody).sum()) if anybody.any() else 0
    return replace(
        workload,
        lags=counted,
        requests=workload.requests - beside,
        others=workload.others + beside,
    )


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
        reader: StateView,
        requests: int,
    ) -> None:
        self.ms = 0.0
        self.leaves_out = False
        self._chunk = max(chunk, LEAST_CHUNK)
        self._snapshot = snapshot
        self._reader = reader
        self._requests = requests
        self._read: dict[str, int] = {}  # tokens by model

    def note(self, drafting: Drafting, drafts: bool = True) -> Drafting:
        """The cycle reads this; without what is read for rows that draft, if none does."""
        share = 1.0 if drafts else 1.0 - drafting.able_share
        for name, tokens in drafting.tokens.items():
            self._read[name] = self._read.get(name, 0) + round(share * tokens)
        self.ms += share * drafting.ms
        self.leaves_out |= drafting.leaves_out
        return drafting

    def drafting(
        self,
        chain: Chain,
        requests: Mapping[int, RequestView],
        gain_ms: float | None = None,
    ) -> Drafting:
        """Who of the requests, by row, drafts through a chain.

        Args:
            gain_ms: see the function; None: they are caught up whatever that costs.
        """
        if len(chain) == 1:
            return Drafting(frozenset(requests))
        every = np.array(sorted(requests), dtype=np.int64)
        missed = np.stack([self._reader.missed(name, every) for name in chain[:-1]])
        behind = np.where(missed > CATCH_UP_TOKENS, missed, 0)
        which = behind.any(axis=0)
        if not which.any():
            return Drafting(frozenset(requests))
        rows, lags = every[which], dict(zip(chain[:-1], behind[:, which], strict=True))
        slots = self._reader.slots_of(rows)
        remaining = np.array([requests[row].remaining for row in rows.tolist()])
        pays = remaining > 1
        if gain_ms is not None:
            pays &= self._pays(chain[-1], lags, slots, remaining, gain_ms)
        able, tokens, shares, ms = pays.copy(), {}, {}, 0.0
        for name, lag in lags.items():
            wanted = np.where(pays, lag, 0)
            left = max(0, self._chunk - self._read.get(name, 0))
            shares[name] = share_shortest_first(wanted, left)
            able &= shares[name] == lag
            tokens[name] = int(shares[name].sum())
            ms += self._share_ms(name, chain[-1], slots, shares[name])
        at_once = sum(int(share[able].sum()) for share in shares.values())
        return Drafting(
            frozenset([*every[~which].tolist(), *rows[able].tolist()]),
            frozenset(rows[pays].tolist()),
            tokens,
            ms,
            at_once / max(1, sum(tokens.values())),
            bool((pays & ~able).any()),
        )

    def _pays(
        self, target: str, lags: Mapping[str, Ints], slots: Ints, remaining: Ints, gain_ms: float
    ) -> Bools:
        """[R] whether what a row lacks can be earned back in the tokens that are left when it has
        been read, after those of the rows before it."""
        cost_ms = np.zeros(len(slots))
        for name, lag in lags.items():
            cost_ms += reading_ms(self._snapshot(), name, target, lag, slots, self._chunk)
        could = self._requests * cost_ms < remaining * gain_ms  # if it were read at once
        order = np.argsort(cost_ms, kind="stable")
        cycles = np.ones(len(slots), dtype=np.int64)  # until it drafts
        for lag in lags.values():
            ahead = np.cumsum(np.where(could, lag, 0)[order])
            cycles[order] = np.maximum(cycles[order], -(-ahead // self._chunk))
        pays: Bools = self._requests * cost_ms < (remaining - (cycles - 1)) * gain_ms
        return pays & could

    def _share_ms(self, name: str, target: str, slots: Ints, shares: Ints) -> float:
        """Of reading these tokens in one forward."""
        if not shares.any():
            return 0.0
        snapshot = self._snapshot()
        return float(reading_ms(snapshot, name, target, shares, slots, self._chunk).sum())
