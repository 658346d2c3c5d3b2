"""LoadBench: a service under each policy in turn, on the same requests.

Contract: policies take turns, in an order that rotates by round. Objectives are ratios times the
baseline latency, which is measured first: that of a request alone, on the target only; objectives
of the TTFT are times that of a prompt alone, a line through what the shortest and the longest take.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

from research.bench.load_ratios import over_rounds
from research.bench.load_requests import Alone, Point, RequestSource
from research.bench.load_table import describe
from research.bench.options import LoadOptions
from research.named_policies import BASELINES, LIVE
from specrouter.bench.contenders import MeasurementError
from specrouter.bench.load import WallClock
from specrouter.bench.prompts import Texts, Tokenize
from specrouter.bench.replay import (
    Clock,
    LoadRequest,
    ReplayAnswer,
    ReplayOutcome,
    ReplayService,
    Watch,
    figures,
    replay,
)
from specrouter.progress import Progress

_BASELINE_RUNS = 5
_BASELINE_TOKENS = 32
_READING_RUNS = 3
_SETTLING_REQUESTS = 10
_DEFAULT = "slo"  # with which the models are timed where only simulated policies are asked for
_WARM_UP_REQUESTS = 4
_WARM_UP_TOKENS = 16


class UnderPolicies(ReplayService, Protocol):
    def use(self, policy: str) -> None: ...


class LoadBench:
    """A service, under each policy in turn. `alone`: what objectives are ratios to."""

    def __init__(
        self,
        service: UnderPolicies,
        tokenize: Tokenize,
        texts: Texts,
        options: LoadOptions,
        progress: Progress,
        clock: Clock | None = None,
    ) -> None:
        self._service, self._source = service, RequestSource(tokenize, texts, options)
        self._options, self._progress = options, progress
        self._clock = clock or WallClock()
        self.alone: Alone | None = None  # until it was measured

    def run(self, points: Sequence[Point]) -> dict[str, Any]:
        """`points` with the figures of each policy."""
        if not self._options.is_simulated:
            self.settle(points[0])
        self.measure_alone(points[0])
        self._progress.expect(len(points) * self._options.rounds * len(self._options.policies))
        measured = [self._run_point(point) for point in points]
        results = zip(points, measured, strict=True)
        return {"points": [point_result(*pair) for pair in results]}

    def settle(self, point: Point) -> None:
        """Drafters are loaded, timed and tried before anything counts, at several loads."""
        asked = [name for name in self._options.policies if name != "target-only"]
        names = [name for name in asked if name in LIVE]  # the others are only simulated
        if not names and not self._options.is_simulated:
            return
        names = names or [_DEFAULT]
        requests = self._source.requests(point, 0, None)[:_SETTLING_REQUESTS]
        for name in names[-1:] * 2 + names[:1]:
            self._progress.show(f"settling: {name}")
            self._service.use(name)
            for count in (1, len(requests) // 2, len(requests)):
                together = [_at_once(one) for one in requests[: max(1, count)]]
                self._replay(together)

    def measure_alone(self, point: Point) -> Alone:
        """What objectives are ratios to from now on. Raises `MeasurementError`."""
        baseline_ms = self.measure_baseline(point)
        self._progress.note(f"baseline latency {baseline_ms:.2f} ms a token")
        reading: tuple[tuple[int, float], ...] = ()
        if self._options.ttft_slowdown is not None:
            reading = self.measure_reading(point)
            shortest, longest = (f"{ms:.0f} ms for {tokens}" for tokens, ms in reading)
            self._progress.note(f"TTFT alone: {shortest} tokens, {longest}")
        self.alone = Alone(baseline_ms, reading)
        return self.alone

    def measure_baseline(self, point: Point) -> float:
        """Median TPOT, in ms, of requests that run one at a time on the target only.

        Raises:
            MeasurementError: one of them failed.
        """
        self._service.use("target-only")
        requests = self._source.requests(point, 0, None)
        longest = sorted(requests, key=lambda request: -request.new_tokens)
        found = []
        for request in longest[: _BASELINE_RUNS + 1]:
            tokens = max(2, min(request.new_tokens, _BASELINE_TOKENS))  # one alone has no TPOT
            answer = self._answered_alone(request, tokens)
            if answer.error is not None or not answer.tpot_ms:
                raise MeasurementError(f"baseline: {answer.error or 'no time per token'}")
            found.append(answer.tpot_ms)
        return median(found[1:] or found)  # the first one warms up

    def measure_reading(self, point: Point) -> tuple[tuple[int, float], ...]:
        """Tokens of the shortest and the longest prompt, and the median TTFT of either alone.

        Raises:
            MeasurementError: one of them failed.
        """
        requests = self._source.requests(point, 0, None)
        by_length = sorted(requests, key=lambda request: len(request.token_ids))
        found = []
        for request in (by_length[0], by_length[-1]):
            took_ms = []
            for _ in range(_READING_RUNS):
                answer = self._answered_alone(request, 1)
                if answer.error is not None or answer.ttft_ms is None:
                    raise MeasurementError(f"TTFT alone: {answer.error or 'no first token'}")
                took_ms.append(answer.ttft_ms)
            found.append((len(request.token_ids), median(took_ms)))
        return tuple(found)

    def _answered_alone(self, request: LoadRequest, new_tokens: int) -> ReplayAnswer:
        """By the target only, while nothing else runs."""
        alone = replace(_at_once(request), new_tokens=new_tokens, speculation="off")
        return self._replay([alone])[0].answer

    def _run_point(self, point: Point) -> dict[str, list[list[ReplayOutcome]]]:
        """Outcomes by policy, a list for each round."""
        names = self._options.policies
        found: dict[str, list[list[ReplayOutcome]]] = {name: [] for name in names}
        for number in range(self._options.rounds):
            start = number % len(names)
            for name in (*names[start:], *names[:start]):
                found[name].append(self.run_policy(name, point, number))
        return found

    def run_policy(self, name: str, point: Point, number: int) -> list[ReplayOutcome]:
        """Of the requests of round `number`."""
        label = f"{describe(point.to_json())}, round {number + 1}: {name}"
        self._progress.show(label)
        self._service.use(name)
        requests = self._source.requests(point, number, self.alone)
        self._warm_up(requests)

        def watch(elapsed_s: float, sent: int, running: int) -> None:
            self._progress.show(
                f"{label}: {elapsed_s:.0f} s, {sent}/{len(requests)} submitted, "
                f"{running} running, {sent - running} finished"
            )

        outcomes = self._replay(requests, watch)
        self._progress.step()
        row = figures(outcomes)
        self._progress.note(f"{label}: {_summary(row)}")
        error = next((o.answer.error for o in outcomes if o.answer.error is not None), None)
        if error is not None:
            self._progress.note(f"{label}: the first of {row['errors']} errors: {error}")
        return outcomes

    def _warm_up(self, requests: Sequence[LoadRequest]) -> None:
        """A few together, not counted: the policy meets its shapes, and learns a little."""
        few = [
            replace(one, at_s=0.0, new_tokens=min(one.new_tokens, _WARM_UP_TOKENS))
            for one in requests[:_WARM_UP_REQUESTS]
        ]
        self._replay(few)

    def _replay(
        self, requests: Sequence[LoadRequest], watch: Watch = lambda *_: None
    ) -> list[ReplayOutcome]:
        """As a tenant of its own: the same requests have been answered before."""
        tenant = secrets.token_hex(8)
        own = [replace(one, tenant=tenant) for one in requests]
        return replay(own, self._service, self._clock, watch)


def _at_once(request: LoadRequest) -> LoadRequest:
    """Without objectives."""
    return replace(request, at_s=0.0, objective_ms=None, e2e_ms=None, ttft_ms=None, stages=())


def point_result(
    point: Point, outcomes: Mapping[str, Sequence[Sequence[ReplayOutcome]]]
) -> dict[str, Any]:
    """See `over_rounds`."""
    by_round = [
        dict(zip(outcomes, map(figures, found), strict=True))
        for found in zip(*outcomes.values(), strict=True)
    ]
    return {**point.to_json(), "policies": over_rounds(by_round, BASELINES)}


def _summary(row: Mapping[str, Any]) -> str:
    attained = "-" if row["attainment"] is None else f"{row['attainment']:.0%}"
    return f"{attained} attained, goodput {row['goodput_tokens_per_s']:.1f} tokens/s"
