"""The six scenarios of SLOs-Serve's evaluation, as requests with objectives.

Lengths are log-normal with the published means and deviations of each dataset, so none of them is
needed here. ChatBot and Coder can be had with Azure's own lengths and times: give the arrivals of a
trace. Gaps are exponential for Azure's chatting, which is nearly Poisson; its coding comes in
bursts, drawn here as gamma gaps, milder than the trace's.

TTFT objectives are so many times the zero-load TTFT of the machine; TPOT is judged over every run
of ten tokens. Rounds of ToolLLM are requests of their own: the next comes when the one before is
due, and each is judged alone.

Contract: pure; a seed gives one list of requests, and rates only stretch its gaps.
Source: SLOs-Serve (arXiv 2504.08784), section 6, Tables 1 to 4.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from research.bench.traces import Arrival
from specrouter.bench.replay import LoadRequest
from specrouter.profile.batch_time import BatchTime
from specrouter.request.objective import Stage

TIGHT, LOOSE = (3.0, 50.0), (5.0, 100.0)  # TTFT over that of zero load, TPOT in ms (Table 3)
BURST_CV = 3.0  # of gamma gaps; Azure's coding trace of 2023 has 13.6, its chatting 1.1
_LONGEST = 2048  # tokens of a request: OPT's context


@dataclass(frozen=True)
class Lengths:
    """A log-normal law of whole lengths, at least `least`."""

    mean: float
    std: float
    least: int = 1

    def draw(self, draws: random.Random) -> int:
        sigma = math.sqrt(math.log1p((self.std / self.mean) ** 2))
        mu = math.log(self.mean) - sigma**2 / 2.0
        return max(self.least, round(draws.lognormvariate(mu, sigma)))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Requests of one application.

    Attributes:
        ttft: TTFT objective over the zero-load TTFT.
        tpots_ms: of each stage of the output, `outputs` their lengths.
        rounds: mean and deviation of the number of rounds; the last one decodes at `last_tpot_ms`.
    """

    name: str
    prompt: Lengths
    outputs: tuple[Lengths, ...]
    ttft: float
    tpots_ms: tuple[float, ...]
    rounds: tuple[float, float] | None = None
    last_tpot_ms: float | None = None


@dataclass(frozen=True)
class Scenario:
    """`machine`: file of `research/machines` that it is served on first. A request is of one of the
    kinds, all equally likely."""

    name: str
    kinds: tuple[Kind, ...]
    is_bursty: bool
    machine: str = "slos-serve-opt-6.7b"

    @property
    def tightest_tpot_ms(self) -> float:
        return min(min(kind.tpots_ms) for kind in self.kinds)


_CHAT = Kind(
    name="chat",
    prompt=Lengths(763, 424),
    outputs=(Lengths(266, 160, 2),),
    ttft=LOOSE[0],
    tpots_ms=(LOOSE[1],),
)
_CODE = Kind(
    name="code",
    prompt=Lengths(847, 617),
    outputs=(Lengths(26, 47, 2),),
    ttft=LOOSE[0],
    tpots_ms=(TIGHT[1],),
)
_SUMMARY = Kind(
    name="summary",
    prompt=Lengths(1333, 444),
    outputs=(Lengths(202, 234, 2),),
    ttft=TIGHT[0],
    tpots_ms=(LOOSE[1],),
)
_TOOL = Kind(
    name="tool",
    prompt=Lengths(690, 356),
    outputs=(Lengths(116, 66, 2),),
    ttft=TIGHT[0],
    tpots_ms=(TIGHT[1],),
    rounds=(2.7, 1.1),
    last_tpot_ms=LOOSE[1],
)
_REASONING = Kind(
    name="reasoning",
    prompt=Lengths(127, 83),
    outputs=(Lengths(4693, 1442, 2), Lengths(803, 280, 2)),
    ttft=TIGHT[0],
    tpots_ms=(TIGHT[1], LOOSE[1]),
)
SCENARIOS: Mapping[str, Scenario] = {
    one.name: one
    for one in (
        Scenario("ChatBot", (_CHAT,), is_bursty=False),
        Scenario("Coder", (_CODE,), is_bursty=True),
        Scenario("Summarizer", (_SUMMARY,), is_bursty=False),
        Scenario("Mixed", (_CHAT, _CODE, _SUMMARY), is_bursty=False),
        Scenario("ToolLLM", (_TOOL,), True, "slos-serve-toolllama-7b"),
        Scenario("Reasoning", (_REASONING,), False, "slos-serve-r1-qwen-1.5b"),
    )
}


def scenario_requests(
    scenario: Scenario,
    times: BatchTime,
    rate_per_s: float,
    count: int,
    seed: int,
    trace: Sequence[Arrival] = (),
) -> list[LoadRequest]:
    """`count` requests, or sessions of ToolLLM, by rising time.

    Args:
        times: of the machine, for zero-load TTFTs.
        trace: arrivals whose times, and for scenarios of one kind with one round and stage lengths,
            are taken instead of drawn ones; from a place that the seed chooses.
    """
    draws = random.Random(f"{scenario.name} {seed}")
    took = _excerpt(trace, count, draws)
    at_s = _times(scenario, count, draws, took)
    scale = (at_s[-1] * rate_per_s / (count - 1)) if count > 1 else 1.0
    found: list[LoadRequest] = []
    for place, each in enumerate(at_s):
        kind = draws.choice(scenario.kinds)
        lengths = took[place] if took and scenario.name in ("ChatBot", "Coder") else None
        session = _session(kind, each / scale, times, draws, lengths)
        first = seed * 1_000_000 + len(found)
        found += [replace(one, seed=first + at) for at, one in enumerate(session)]
    return sorted(found, key=lambda one: one.at_s)


def _times(
    scenario: Scenario, count: int, draws: random.Random, took: Sequence[Arrival]
) -> list[float]:
    if took:
        return [one.at_s - took[0].at_s for one in took]
    shape = 1.0 / BURST_CV**2 if scenario.is_bursty else 1.0
    found, now_s = [], 0.0
    for _ in range(count):
        found.append(now_s)
        now_s += draws.gammavariate(shape, 1.0 / shape)
    return found


def _excerpt(trace: Sequence[Arrival], count: int, draws: random.Random) -> Sequence[Arrival]:
    fitting = [one for one in trace if one.input_tokens + one.output_tokens <= _LONGEST]
    if not fitting:
        return ()
    first = draws.randrange(max(1, len(fitting) - count))
    return fitting[first : first + count]


def _session(
    kind: Kind, at_s: float, times: BatchTime, draws: random.Random, lengths: Arrival | None
) -> list[LoadRequest]:
    rounds = 1 if kind.rounds is None else max(1, round(draws.gauss(*kind.rounds)))
    found = []
    for number in range(rounds):
        read, made = _lengths(kind, draws, lengths)
        tpots_ms = kind.tpots_ms
        if number == rounds - 1 and kind.last_tpot_ms is not None:
            tpots_ms = (kind.last_tpot_ms,)
        ttft_ms = kind.ttft * times.ms(read)
        ends = [*made[:-1], None]
        stages = tuple(Stage(*each) for each in zip(tpots_ms, ends, strict=True))
        found.append(
            LoadRequest(
                at_s=at_s,
                category=kind.name,
                token_ids=(0,) * read,
                new_tokens=sum(made),
                temperature=1.0,
                seed=0,
                objective_ms=tpots_ms[0] if len(made) == 1 else None,
                ttft_ms=ttft_ms,
                stages=stages if len(made) > 1 else (),
                judges_runs=True,
            )
        )
        due_ms = sum(tokens * ms for tokens, ms in zip(made, tpots_ms, strict=True))
        at_s += (ttft_ms + due_ms) / 1000.0
    return found


def _lengths(
    kind: Kind, draws: random.Random, lengths: Arrival | None
) -> tuple[int, tuple[int, ...]]:
    """Of a prompt, and of each stage of the output."""
    if lengths is not None:
        return lengths.input_tokens, (max(2, lengths.output_tokens),)
    read, made = kind.prompt.draw(draws), tuple(each.draw(draws) for each in kind.outputs)
    if len(made) > 1:
        return read, made
    made = (min(made[0], _LONGEST // 2),)
    return min(read, _LONGEST - made[0]), made
