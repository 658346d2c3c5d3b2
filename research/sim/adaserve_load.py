"""AdaServe's workload: three categories with TPOT objectives, by its own traces or drawn like them.

Contract: pure but for the traces, which are read from a folder. A seed gives one list of requests.
Drawn ones are Poisson arrivals with the traces' mix, median lengths and outputs of 256 tokens.
Source: AdaServe (EuroSys '26), section 6.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from research.bench import traces
from research.bench.traces import Arrival
from specrouter.bench.replay import LoadRequest

URGENT = "coding"
URGENT_RATIO = 1.2  # of its objective to the baseline latency (Table 2)
# Requests per second of the artifact's traces; each is stretched to the rate that is asked for.
_TRACED_RATES = (2.8, 3.6, 4.4)
# Of each category in turn, when it is at its peak: a share of the whole time (Figure 13's shape).
_PEAKS = {"coding": 0.2, "chat": 0.5, "summarization": 0.8}
_PEAK_WIDTH = 0.12
_CALM = 0.25  # rate away from the peak, over that at the peak


@dataclass(frozen=True, kw_only=True)
class AdaserveLoad:
    """Attributes:
    urgent_share: of requests; None: the traces' 0.6.
    urgent_ratio: objective of urgent ones over the baseline latency.
    is_fluctuating: categories peak one after the other.
    traces: folder of the artifact's traces; None: arrivals are drawn.
    """

    rate_per_s: float
    requests: int
    seed: int
    urgent_share: float | None = None
    urgent_ratio: float = URGENT_RATIO
    is_fluctuating: bool = False
    traces: Path | None = None

    def arrivals(self, baseline_ms: float) -> list[Arrival]:
        """Args: `baseline_ms`: of a token of a request alone, which objectives are ratios of.

        Raises `ConfigError` where a trace cannot be read or is too short.
        """
        if self.traces is None or self.is_fluctuating:
            found = traces.poisson(self.rate_per_s, self.requests, baseline_ms, self.seed)
        else:
            nearest = min(_TRACED_RATES, key=lambda rate: abs(rate - self.rate_per_s))
            file = self.traces / f"adaserve_fig8_9_rps{nearest}_ol256.csv"
            whole = traces.read_trace(file, baseline_ms)
            room = max(1, len(whole) - self.requests)
            first = self.seed * self.requests % room
            found = traces.excerpt(whole, first, self.requests)
            found = traces.stretched(found, traces.rate_per_s(found) / self.rate_per_s)
        if self.urgent_share is not None:
            found = traces.with_urgent_share(found, self.urgent_share, self.seed)
        if self.is_fluctuating:
            found = _fluctuating(found, self.seed)
        return [self._urgent(one) for one in found]

    def requests_for(self, baseline_ms: float) -> list[LoadRequest]:
        return requests_of(self.arrivals(baseline_ms), baseline_ms, self.seed)

    def _urgent(self, arrival: Arrival) -> Arrival:
        if arrival.category != URGENT or arrival.slo_ratio is None:
            return arrival
        return replace(arrival, slo_ratio=arrival.slo_ratio * self.urgent_ratio / URGENT_RATIO)


def requests_of(
    arrivals: Sequence[Arrival], baseline_ms: float, seed: int, ttft_ms: float | None = None
) -> list[LoadRequest]:
    return [
        LoadRequest(
            at_s=one.at_s,
            category=one.category,
            token_ids=(0,) * one.input_tokens,
            new_tokens=one.output_tokens,
            temperature=1.0,
            seed=seed * 1_000_000 + place,
            objective_ms=None if one.slo_ratio is None else one.slo_ratio * baseline_ms,
            ttft_ms=ttft_ms,
        )
        for place, one in enumerate(arrivals)
    ]


def _fluctuating(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
    """The same requests, each category about its own peak."""
    draw = random.Random(f"peaks {seed}")
    span_s = arrivals[-1].at_s
    found = [replace(one, at_s=span_s * _place(one.category, draw)) for one in arrivals]
    return sorted(found, key=lambda one: one.at_s)


def _place(category: str, draw: random.Random) -> float:
    """By rejection: the density is 1 at the peak."""
    peak = _PEAKS.get(category, 0.5)
    while True:
        at = draw.random()
        bump = math.exp(-(((at - peak) / _PEAK_WIDTH) ** 2))
        if draw.random() < _CALM + (1.0 - _CALM) * bump:
            return at
