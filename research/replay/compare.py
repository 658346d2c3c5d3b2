"""Recorded decisions, decided again: same chain, same route, and regret where they differ.

Decisions are in a closed loop: what is in use, for hysteresis, is the replayed code's own last
answer to the same requests. Facts are the recorded run's, whatever is answered.

Regret of a decision that differs: (best - chosen) / best of tokens per ms. What a chain brings is
the median measured in the same recording with the chain fixed, at the same kind of text and about
the same number of requests; the best is of the chains measured there. A decision that is the
recorded one has no regret, and one without such measurements is counted and not scored.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean, median

from research.replay.adapter import Answer, Decider, Route
from research.replay.facts import Fact
from research.replay.recording import Phase, Recording

_SAME_LOAD = 1.25  # factor within which numbers of requests are about the same

Chain = tuple[str, ...]


@dataclass(frozen=True)
class Compared:
    """One decision. `loss_now` and `loss`: how far its chain and the recorded one lie below the
    best that was measured, as a share of it; None: no measured counterpart."""

    recorded: Route
    answered: Route
    loss_now: float | None
    loss: float | None

    @property
    def regret(self) -> float | None:
        """The loss where the chains differ."""
        return 0.0 if self.same_chain and self.loss_now is not None else self.loss_now

    @property
    def same_chain(self) -> bool:
        return self.recorded[0] == self.answered[0]

    @property
    def same_route(self) -> bool:
        return self.recorded == self.answered


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of some decisions; `regret`, `loss_now` and `loss` are means over those that are scored."""

    decisions: int
    same_chain: float
    same_route: float
    scored: int
    regret: float
    loss_now: float
    loss: float

    @classmethod
    def of(cls, compared: Iterable[Compared]) -> "Figures":
        each = list(compared)
        scored = [one for one in each if one.regret is not None]
        return cls(
            decisions=len(each),
            same_chain=fmean(one.same_chain for one in each) if each else 1.0,
            same_route=fmean(one.same_route for one in each) if each else 1.0,
            scored=len(scored),
            regret=fmean(one.regret or 0.0 for one in scored) if scored else 0.0,
            loss_now=fmean(one.loss_now or 0.0 for one in scored) if scored else 0.0,
            loss=fmean(one.loss or 0.0 for one in scored) if scored else 0.0,
        )


@dataclass
class Measured:
    """Tokens per ms of fixed chains, by kind of text and batch."""

    rates: dict[tuple[str, int], dict[Chain, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, recording: Recording) -> "Measured":
        return cls(
            {
                key: {chain: median(rates) for chain, rates in by_chain.items()}
                for key, by_chain in _rounds(recording).items()
            }
        )

    def at(self, phase: Phase, requests: int) -> dict[Chain, float] | None:
        """At the nearest batch, if it is about as large."""
        near = [
            (max(batch, requests) / min(batch, requests), batch)
            for kind, batch in self.rates
            if kind == phase.kind
        ]
        if not near or min(near)[0] > _SAME_LOAD:
            return None
        return self.rates[phase.kind, min(near)[1]]


def _rounds(recording: Recording) -> dict[tuple[str, int], dict[Chain, list[float]]]:
    """Tokens per ms of each round of a fixed chain."""
    found: defaultdict[tuple[str, int], defaultdict[Chain, list[float]]]
    found = defaultdict(lambda: defaultdict(list))
    for one in recording.rounds:
        phase = recording.phases[one.phase]
        assert phase.chain is not None
        assert phase.batch is not None
        found[phase.kind, phase.batch][phase.chain].append(one.tokens / one.ms)
    return {key: dict(by_chain) for key, by_chain in found.items()}


def loss(rates: dict[Chain, float] | None, chain: Chain) -> float | None:
    if rates is None or chain not in rates:
        return None
    best = max(rates.values())
    return (best - rates[chain]) / best


def route_of(fact: Fact) -> Route:
    return tuple(fact["chain"]), fact["depth"], fact["width"], fact["nodes"], fact["rounds"]


def decide_again(
    recording: Recording,
    most: int | None = None,
    tell: Callable[[], object] = lambda: None,
    decider_of: Callable[..., Decider] = Decider,
) -> list[Compared]:
    """All decisions of a recording, or the first ones, answered by the code of this tree.

    Args:
        tell: is called after each.
    """
    decider = decider_of(recording.about, recording.schedulers)
    wanted = {fact["view"] for fact in recording.facts if fact.kind == "decision"}
    views: dict[int, object] = {}
    states: dict[tuple[int, str], Answer] = {}
    measured, found, number = Measured.of(recording), list[Compared](), 0
    for fact in recording.facts:
        if fact.kind == "view":
            view = decider.view()  # also where nobody asks: looking may do something
            if number in wanted:
                views[number] = view
            number += 1
        elif fact.kind == "decision":
            key = fact["who"], str(fact["asked"])
            current = None if fact["first"] else states[key].state
            answer = states[key] = decider.decide(views[fact["view"]], fact, current)
            found.append(_compared(fact, answer, recording.phases[fact["phase"]], measured))
            tell()
            if len(found) == most:
                break
        else:
            decider.learn(fact)
    return found


def _compared(fact: Fact, answer: Answer, phase: Phase, measured: Measured) -> Compared:
    recorded, answered = route_of(fact), answer.route
    # What others of the cycle do is no part of a measurement.
    rates = measured.at(phase, fact["requests"]) if not fact["others"] else None
    ours, theirs = loss(rates, answered[0]), loss(rates, recorded[0])
    if ours is None or theirs is None:
        return Compared(recorded, answered, None, None)
    return Compared(recorded, answered, ours, theirs)


def switched(compared: Iterable[Compared]) -> Counter[tuple[Chain, Chain]]:
    """Recorded and answered chains of the decisions that differ."""
    return Counter((one.recorded[0], one.answered[0]) for one in compared if not one.same_chain)
