"""RequestDrafters: which drafter suits which request, where those of one batch may differ.

A new request tries some drafters in turn, and is given the one that served it best against how it
serves everybody; `ModelChainScheduler.split` judges whether several groups pay.

Pure bookkeeping: no clock, no tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specrouter.profile.prediction import Option, Workload
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.request.running import RunningRequest
from specrouter.routing.scheduler import ModelChainScheduler

_TRIED_CYCLES = 2  # of each of the drafters that a new request tries
_TRIED = 3
_TRIED_LOSS = 1.15  # how much slower than the best a drafter may be and still be tried
_REQUEST_PRIOR = 24.0  # tokens of a request that count as everybody's


class RequestDrafters:
    def __init__(self) -> None:
        self._rates: dict[RunningRequest, RequestRates] = {}

    def learn(self, request: RunningRequest, option: Option, gained: int) -> None:
        """What a cycle brought one request."""
        rates = self._rates.setdefault(request, RequestRates())
        rates.record(option.chain[:-1], gained - 1.0, option.tokens - 1.0)

    def forget(self, request: RunningRequest) -> None:
        self._rates.pop(request, None)

    def split(
        self,
        scheduler: ModelChainScheduler,
        snapshot: PerformanceSnapshot,
        workload: Workload,
        pairs: Sequence[Option],
        requests: Mapping[int, RunningRequest],
    ) -> dict[int, Option]:
        """What each of the requests goes through, by row; nothing without `pairs`, see
        `ModelChainScheduler.pairs`. `workload`: of all of them."""
        if not pairs:
            return {}
        slowest = _TRIED_LOSS * pairs[0].ms_per_token
        tried = [option for option in pairs if option.ms_per_token < slowest][:_TRIED]
        chosen: dict[int, Option] = {}
        settled: list[int] = []
        for row, request in requests.items():
            turn = request.cycles // _TRIED_CYCLES
            if turn < len(tried):
                chosen[row] = tried[turn]
            else:
                settled.append(row)
        factors = []
        for row in settled:
            rates = self._rates.get(requests[row], RequestRates())
            factors.append({option.chain[:-1]: rates.factor(option.chain[:-1]) for option in tried})
        if settled:
            trying = len(requests) - len(settled)
            own = replace(workload, requests=len(settled), others=workload.others + trying)
            options = scheduler.split(snapshot, own, pairs, factors)
            chosen.update(zip(settled, options, strict=True))
        return chosen


class RequestRates:
    """How well each chain's trees serve one request, against everybody: a factor on the tokens that
    drafts bring, drawn to 1 where there is little evidence."""

    def __init__(self) -> None:
        self._sums: dict[Chain, tuple[float, float]] = {}

    def record(self, proposers: Chain, accepted: float, expected: float) -> None:
        seen, foreseen = self._sums.get(proposers, (0.0, 0.0))
        fade = 1.0 - min(0.5, expected / 200.0)
        self._sums[proposers] = (seen * fade + accepted, foreseen * fade + expected)

    def factor(self, proposers: Chain) -> float:
        seen, foreseen = self._sums.get(proposers, (0.0, 0.0))
        return (seen + _REQUEST_PRIOR) / (foreseen + _REQUEST_PRIOR)
