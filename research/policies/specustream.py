"""SpecuStream: how deep each request speculates, and how many speculate at once.

StreamServe (arXiv 2604.09562), section 3.5 and Algorithm 4. A request speculates deeper the more of
its drafts is accepted, less deep the busier the engine is, and deeper while the engine is slower
than a throughput that it aims at. Deeper drafts come in smaller micro-batches.

As printed, the flow vector holds the deviations of the acceptance rate from the vector's own mean.
For a constant rate a they settle at a/2, which is no volatility, and a volatile rate deepens
drafts, against the text. `acceptances` keeps the rates themselves, so that the flow's magnitude is
the mean acceptance rate: high and stable means deep. Equations 15 and 16 let the recent throughput
grow without bound; Algorithm 4, which takes the measured one, is what is built. More in
research/FIGURES.md.

Pure: what a request's flow was comes in with the view, and goes out with the plan.
"""

import math
from dataclasses import dataclass
from typing import Literal

from specrouter.routing.chain_policy import FixedChain, RequestDepth
from specrouter.view import EngineView

HISTORY = 10  # h: of the flow vector
_BASE_DEPTH = 5  # d_base
_AMPLIFICATION = 5.0  # gamma
LEAST_DEPTH, MOST_DEPTH = 2, 20
_TARGET_TOKENS_PER_S = 400.0
_MOST_LOAD = 0.9
_MICRO_BATCH_TOKENS = 16 * 5  # Equation 14


@dataclass(frozen=True)
class Flow:
    """What is remembered of a request.

    Attributes:
        vector: the last values, circularly; empty before the first.
        updates: so far; `drafts`: of the request, at the last one.
    """

    vector: tuple[float, ...] = ()
    updates: int = 0
    drafts: int = 0


@dataclass(frozen=True)
class SpecuStream(FixedChain):
    """The smallest drafter, or `scheduler.chain`; each request sets its own depth.

    `remembers`: what the flow vector holds; `deltas` is as printed.
    """

    remembers: Literal["deltas", "acceptances"] = "deltas"
    takes_chain = drafts_paths = True
    default_depth = 20  # of the chain; `depths` says how much of it is used

    def depths(self, view: EngineView) -> dict[int, RequestDepth]:
        """By id, of the running requests."""
        running = view.running
        load = len(running) / max(len(running) + view.free_rows, 1)
        flows, tokens_per_s = view.standing.memories, throughput(view)
        columns = running.id.tolist(), running.drafts.tolist(), running.acceptance.tolist()
        found = dict[int, RequestDepth]()
        for name, drafts, acceptance in zip(*columns, strict=True):
            flow: Flow = flows.get(name, Flow())
            if drafts > flow.drafts:  # news: of more than one draft the last is known
                flow = self.updated(flow, acceptance, drafts)
            depth = self.depth(flow, acceptance, load, tokens_per_s)
            together = max(1, math.floor(_MICRO_BATCH_TOKENS / depth))
            found[name] = RequestDepth(levels=round(depth), together=together, memory=flow)
        return found

    def updated(self, flow: Flow, acceptance: float, drafts: int) -> Flow:
        """Equation 8. `drafts`: of the request so far."""
        vector = list(flow.vector or (0.0,) * HISTORY)
        delta = acceptance - sum(vector) / HISTORY
        vector[flow.updates % HISTORY] = delta if self.remembers == "deltas" else acceptance
        return Flow(tuple(vector), flow.updates + 1, drafts)

    def depth(self, flow: Flow, acceptance: float, load: float, tokens_per_s: float) -> float:
        """Equations 9 to 13. `load`: share of the rows that are in use."""
        magnitude = sum(map(abs, flow.vector)) / HISTORY
        slowness = max(1.0, _TARGET_TOKENS_PER_S / max(tokens_per_s, 1.0))
        room = 1.0 - min(load, _MOST_LOAD)
        depth = _BASE_DEPTH + acceptance * magnitude * _AMPLIFICATION * room * slowness
        return min(max(depth, LEAST_DEPTH), MOST_DEPTH)


def throughput(view: EngineView) -> float:
    """Tokens/s of the requests that decode, each in its current stage; 0.0 before their first."""
    running = view.running.take(view.running.decode_ms > 0.0)
    speeds: list[float] = (running.decoded / running.decode_ms * 1000).tolist()
    return sum(speeds)


SPECUSTREAM = SpecuStream("deltas")
SPECUSTREAM_FIXED = SpecuStream("acceptances")
