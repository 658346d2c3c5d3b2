"""Catching up: for which rows drafters read unread tokens, how many in a cycle, and who drafts.

A drafter lags behind a row whose prompt it never read, or whose text was decoded without it. In one
cycle each model reads at most a chunk of unread tokens, of all rows together, so that a long text
does not delay the other rows. A row that still lags by more than `CATCH_UP_TOKENS` decodes without
a draft. The shortest texts come first, because their rows can draft soonest. The target reads no
more prompt tokens in a cycle than that, so new prompts delay a long text only while the target is
busy.

Reading delays all requests and helps one. That one must earn it back:

    requests * time to read  <  tokens that it will draft for * time gained by each

Pure: no clock, no tensors. Not here: the reading (`specrouter.execution.drafter_prefill`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from modelpool.attention.backend import READING_QUERIES
from specrouter.cycle import CATCH_UP_TOKENS, LEAST_CHUNK, Option, share_shortest_first
from specrouter.profile.cycle_times import Workload, curve_of
from specrouter.profile.prediction import target_only
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.view import ChainDecision, RequestTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """The rows for which a chain drafts in this cycle, and those for which its models have to read.

    Reading does not pay for all other rows.

    Attributes:
        able: [R] requests that draft in this cycle, since the models have read all of their text by
            then.
        reads: [R] requests for which the models read in this cycle, and perhaps in later ones.
        tokens: unread tokens that are read in this cycle, by model.
        ms: time that this reading takes.
        able_share: share of these tokens that is read for `able` requests.
        leaves_out: some of `reads` still lag after this cycle.
    """

    able: Bools
    reads: Bools
    tokens: Mapping[str, int] = field(default_factory=dict)
    ms: float = 0.0
    able_share: float = 0.0
    leaves_out: bool = False

    def options(self, now: Option, later: Option, alone: Option) -> list[Option]:
        """Return the option by which each request decodes in a cycle of the option `now`.

        `later` is the option of other cycles. Requests that drafters read for get it if this cycle
        does not draft.
        """
        drafts = len(now.chain) > 1
        reads, rest = (now, alone) if drafts else (later, now)
        return [
            now if able else reads if read else rest
            for able, read in zip(self.able.tolist(), self.reads.tolist(), strict=True)
        ]


def gain_ms(decision: ChainDecision, machine: float) -> float | None:
    """Return the time that a decision's drafts save per token; None without a prediction."""
    main = decision.predicted
    if main is None:
        return None
    alone_ms = decision.predicted_ms[main.chain[-1:]]
    return machine * (alone_ms - main.cycle_ms / main.tokens)


class CycleCatchUp:
    """The unread tokens that drafters read in one cycle.

    Attributes:
        ms: time of all reading that was noted so far.
        leaves_out: there are requests for which the noted chains cannot draft yet.

    Args:
        chunk: the most tokens that a model reads.
        snapshot: measured times.
        requests: number of requests that the cycle delays.
    """

    def __init__(self, chunk: int, snapshot: PerformanceSnapshot, requests: int) -> None:
        self.ms = 0.0
        self.leaves_out = False
        self._chunk = max(chunk, LEAST_CHUNK)
        self._snapshot = snapshot
        self._requests = requests
        self._read: dict[str, int] = {}  # tokens by model

    def note(self, drafting: Drafting, drafts: bool = True) -> Drafting:
        """Add this reading to the cycle, without the share of drafting rows unless it `drafts`."""
        share = 1.0 if drafts else 1.0 - drafting.able_share
        for name, tokens in drafting.tokens.items():
            self._read[name] = self._read.get(name, 0) + round(share * tokens)
        self.ms += share * drafting.ms
        self.leaves_out |= drafting.leaves_out
        return drafting

    def drafting(
        self, chain: Chain, requests: RequestTable, gain_ms: float | None = None
    ) -> Drafting:
        """Return for which of the requests a chain can draft, and what its models read for them.

        Args:
            chain: the drafting models, and the target.
            requests: the requests.
            gain_ms: see the function `gain_ms`; None: all rows are caught up, at any cost.
        """
        none = np.zeros(len(requests), dtype=np.bool_)
        lags = {
            name: np.where(lag > CATCH_UP_TOKENS, lag, 0)
            for name in chain[:-1]
            if (lag := requests.unread_by.get(name)) is not None
        }
        lacks = np.any([*lags.values(), none], axis=0)
        if not lacks.any():
            return Drafting(able=~none, reads=none)
        lags = {name: lag[lacks] for name, lag in lags.items()}
        slots, remaining = requests.slots[lacks], requests.remaining[lacks]
        pays = remaining > 1
        if gain_ms is not None:
            pays &= self._pays(chain[-1], slots, lags, remaining, gain_ms)
        shares = {
            name: share_shortest_first(
                np.where(pays, lag, 0), max(0, self._chunk - self._read.get(name, 0))
            )
            for name, lag in lags.items()
        }
        able = pays & np.all([shares[name] == lag for name, lag in lags.items()], axis=0)
        tokens = {name: int(share.sum()) for name, share in shares.items()}
        at_once = sum(int(share[able].sum()) for share in shares.values())
        drafts, reads = ~lacks, none
        drafts[lacks], reads[lacks] = able, pays
        return Drafting(
            able=drafts,
            reads=reads,
            tokens=tokens,
            ms=sum(
                float(self.reading_ms(name, chain[-1], slots, shares[name]).sum())
                for name in shares
                if tokens[name]
            ),
            able_share=at_once / max(1, sum(tokens.values())),
            leaves_out=bool((pays & ~able).any()),
        )

    def payable(self, workload: Workload, target: str, requests: RequestTable) -> Workload:
        """Return the workload without requests for which reading pays for no drafter.

        A long text that ends soon must not keep the drafter from all others. Such requests decode
        in the same pass without drafts. If there are no other requests, all are counted.

        Args:
            workload: the requests that a decision is about.
            target: name of the target.
            requests: the decoding requests of the workload.
        """
        lagging = [model for model, total in workload.lags.items() if total >= 1.0]
        if not lagging:
            return workload
        snapshot, counted = self._snapshot, dict(workload.lags)
        # A draft saves at most the target's own time per token.
        alone_ms = snapshot.machine * target_only(snapshot, workload, target).cycle_ms
        anybody = np.full(len(requests), len(lagging) < len(counted))
        for model in lagging:
            lag = np.maximum(requests.unread_by[model], 0)
            pays = self._pays(target, requests.slots, {model: lag}, requests.remaining, alone_ms)
            pays |= lag <= CATCH_UP_TOKENS
            anybody |= pays
            if pays.any():
                counted[model] = float(np.maximum(lag - 1, 0)[pays].sum())
        beside = int((~anybody).sum()) if anybody.any() else 0
        return replace(
            workload,
            lags=counted,
            requests=workload.requests - beside,
            others=workload.others + beside,
        )

    def reading_ms(self, model: str, target: str, slots: Ints, tokens: Ints) -> Floats:
        """Return the time [R] to read so many tokens of each row, on the machine as it is now.

        Rows share passes of a chunk each, so these are their shares of the passes' times. `slots`
        [R]: KV slots that attention reads for each.
        """
        snapshot = self._snapshot
        packed = min(self._chunk, max(1, int(tokens.sum())))
        seen = np.maximum(slots - tokens / 2, 1.0)  # mean over the pass
        attended = (packed + READING_QUERIES) * seen
        ms = curve_of(snapshot, model, target).many(np.full(len(slots), float(packed)), attended)
        shares: Floats = snapshot.machine * ms * tokens / packed
        return shares

    def _pays(
        self, target: str, slots: Ints, lags: Mapping[str, Ints], remaining: Ints, gain_ms: float
    ) -> Bools:
        """Return whether reading for each row [R] is earned back by the tokens left after it.

        Rows are read in the order of their cost, so each waits for those before it.
        """
        cost_ms = np.zeros(len(slots))
        for name, lag in lags.items():
            cost_ms += self._requests * self.reading_ms(name, target, slots, lag)
        could = cost_ms < remaining * gain_ms  # if it were read at once
        order = np.argsort(cost_ms, kind="stable")
        cycles = np.ones(len(slots), dtype=np.int64)  # cycles until it drafts
        for lag in lags.values():
            ahead = np.cumsum(np.where(could, lag, 0)[order])
            cycles[order] = np.maximum(cycles[order], -(-ahead // self._chunk))
        pays: Bools = cost_ms < (remaining - (cycles - 1)) * gain_ms
        return pays & could
