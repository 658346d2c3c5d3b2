"""One run of requests against a cluster in this process, at their times, and what came of it.

Contract: an open loop. No run finds a prompt in a cache that another one has read. Needs Ray only
if the cluster does.
"""

import asyncio
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import Histogram

from research.bench.traces import Arrival, read_trace
from research.sim.roofline import RooflineTime
from research.sim.scenarios import SCENARIOS, scenario_requests
from specrouter import SLO, SamplingParams
from specrouter.cluster.dispatcher import Dispatcher, state_ages
from specrouter.cluster.router import ClusterRouter
from specrouter.engine.request import Request
from specrouter.engine.serving import streamed
from specrouter.logs import REQUEST_ID
from specrouter.request.output import RequestMetrics, RequestOutput

_PROMPT, _OUTPUT = 700, 256  # tokens at most
_VOCABULARY = (300, 2000)  # of prompts
_SLACK, _MORE_MS = 5.0, 200.0  # objectives, times and beside what one alone takes
_RECORDS = 10_000  # decisions of a run
_FRESH_S = 0.6  # that 99% of what is known of replicas is at most old

ObjectiveOf = Callable[["Asked"], tuple[float, float]]  # TTFT and TPOT in milliseconds


@dataclass(frozen=True, kw_only=True)
class Run:
    """`load`: share of what the replicas could serve. `rejects`: requests whose objective cannot be
    attained ask to be rejected. `settles`: of the `count` requests the first, which are not
    judged: the queue of a replica that more comes to than it can serve grows for a while."""

    policy: str
    load: float
    count: int
    seed: int
    rejects: bool = False
    settles: int = 0


@dataclass(frozen=True)
class Asked:
    at_s: float
    prompt: tuple[int, ...]
    tokens: int
    seed: int


@dataclass(frozen=True)
class Served:
    """`sent_s`: since the run began. `told_s`: to wait, where it was refused."""

    asked: Asked
    sent_s: float
    output: RequestOutput
    told_s: float | None = None


@dataclass(frozen=True)
class Alone:
    """A replica that serves one request at a time.

    Attributes:
        prefill_ms: to the first token, for each token of the prompt.
        tpot_ms: of the output.
        told_ms: TPOT of one request, and of as many as it has rows, as the replica tells it.
    """

    prefill_ms: float
    tpot_ms: float
    told_ms: tuple[float, float]

    def objective(self, asked: Asked) -> tuple[float, float]:
        """TTFT and TPOT in milliseconds, as multiples of its own."""
        return _SLACK * self.prefill_ms * len(asked.prompt) + _MORE_MS, _SLACK * self.tpot_ms

    def rate(self, asked: Sequence[Asked]) -> float:
        """Requests/s of such lengths."""
        prompt = statistics.fmean(len(one.prompt) for one in asked)
        output = statistics.fmean(one.tokens for one in asked)
        return 1000 / (prompt * self.prefill_ms + output * self.tpot_ms)


def retries(served: Sequence[Served]) -> list[tuple[float, float]]:
    """Of refusals: after how long to ask again, as was told, and until a prompt no shorter was
    taken. `Retry-After` is whole seconds, at least one; so is the true wait."""
    found = []
    taken = sorted((one for one in served if one.told_s is None), key=lambda one: one.sent_s)
    for one in served:
        if one.told_s is None:
            continue
        size = len(one.asked.prompt)
        later = (
            each.sent_s - one.sent_s
            for each in taken
            if each.sent_s > one.sent_s and len(each.asked.prompt) >= size
        )
        true_s = next(later, None)
        if true_s is not None:
            found.append((one.told_s, max(1.0, true_s)))
    return found


def within_2(waits: Sequence[tuple[float, float]]) -> float:
    """Share of those that were told within a factor of two."""
    return sum(0.5 <= told / true <= 2.0 for told, true in waits) / max(1, len(waits))


async def load(
    router: ClusterRouter, asked: Sequence[Asked], run: Run, objective: ObjectiveOf
) -> dict[str, Any]:
    """Figures of a run, by the policy that it names."""
    dispatcher = _begin(router, run)
    moved = _moves(router)
    salt, began_s = f"{run.policy} {time.monotonic()}", time.perf_counter()

    async def one(number: int, each: Asked) -> Served:
        await asyncio.sleep(max(0.0, began_s + each.at_s - time.perf_counter()))
        sent_s = time.perf_counter() - began_s
        output = await _served(router, each, salt, number, objective(each), run.rejects)
        return Served(each, sent_s, output, _told_s(output))

    served = await asyncio.gather(*(one(number, each) for number, each in enumerate(asked)))
    judged = served[run.settles :]
    return {
        **_figures(judged),
        "states_within_0.6_s": round(_share_within(dispatcher.ages, _FRESH_S), 4),
        "moves": dict(_moves(router) - moved),
        "replicas": _by_replica(judged, _replicas_of(router, len(served))[run.settles :]),
    }


def _share_within(ages: Histogram, bound_s: float) -> float:
    """Of all, at most so old."""
    [family] = ages.collect()
    counts = {one.labels["le"]: one.value for one in family.samples if "le" in one.labels}
    return counts[str(bound_s)] / counts["+Inf"] if counts["+Inf"] else 1.0


def _begin(router: ClusterRouter, run: Run) -> Dispatcher:
    """Under the run's policy, with nothing counted yet."""
    dispatcher = router._context.dispatcher
    dispatcher._config = dispatcher._config.model_copy(update={"policy": run.policy})
    dispatcher.ages = state_ages()
    dispatcher._records = deque(maxlen=_RECORDS)
    return dispatcher


def _replicas_of(router: ClusterRouter, requests: int) -> list[str | None]:
    """Where each was served last; None: nowhere."""
    records = router._context.dispatcher.records
    last = {record["request_id"]: record["replica"] for record in records}
    return [last.get(str(number)) for number in range(requests)]


async def alone(router: ClusterRouter, asked: Sequence[Asked]) -> dict[str, Alone]:
    """Of each replica. One request after the other, in turn."""
    run, found = Run(policy="round-robin", load=0.0, count=len(asked), seed=0), {}
    _begin(router, run)
    served = []
    for number, each in enumerate(asked):
        output = await _served(router, each, f"alone {time.monotonic()}", number, None, False)
        served.append(Served(each, 0.0, output))
    where = _replicas_of(router, len(served))
    for name, member in router._fleet.members.items():
        here = [one for one, own in zip(served, where, strict=True) if own == name]
        metrics = [(one.output.metrics, len(one.asked.prompt)) for one in here]
        state = member.state
        assert state is not None
        found[name] = Alone(
            statistics.median((one.ttft_ms or 0.0) / prompt for one, prompt in metrics),
            statistics.median(one.tpot_ms or 0.0 for one, _ in metrics),
            (state.tpot_at(1), state.tpot_at(state.rows)),
        )
    return found


def kept_pace(metrics: RequestMetrics) -> bool | None:
    """Whether it kept its TPOT, or that of every stage; None without one or a second token."""
    asked = metrics.objective
    if asked is None or metrics.tpot_ms is None:
        return None
    if asked.stages:
        return all(metrics.attained_stages)
    return None if asked.tpot_ms is None else metrics.tpot_ms <= asked.tpot_ms * (1.0 + 1e-9)


def _figures(served: Sequence[Served]) -> dict[str, Any]:
    metrics = [one.output.metrics for one in served]
    attained = sum(one.attained is True for one in metrics)
    found = retries(served)
    missed: Counter[str] = Counter()
    for one in metrics:
        assert one.objective is not None
        missed["ttft"] += (one.ttft_ms or 0.0) > (one.objective.ttft_ms or 0.0)
        missed["tpot"] += kept_pace(one) is False
    return {
        "requests": len(served),
        "attained": round(attained / len(served), 4),
        "missed": dict(missed),
        "refused": sum(one.told_s is not None for one in served),
        "retry_within_2": round(within_2(found), 3),
        "retries": len(found),
    }


def _by_replica(
    served: Sequence[Served], replicas: Sequence[str | None]
) -> dict[str, dict[str, float]]:
    found = {}
    for name in sorted({each for each in replicas if each is not None}):
        here = [one for one, own in zip(served, replicas, strict=True) if own == name]
        metrics = [one.output.metrics for one in here if one.told_s is None]
        if metrics:
            found[name] = {
                "requests": len(metrics),
                "attained": round(sum(one.attained is True for one in metrics) / len(metrics), 4),
                "ttft_ms": round(statistics.median(one.ttft_ms or 0.0 for one in metrics), 1),
                "tpot_ms": round(statistics.median(one.tpot_ms or 0.0 for one in metrics), 2),
            }
    return found


def _moves(router: ClusterRouter) -> Counter[str]:
    total: Counter[str] = Counter()
    for member in router._fleet.members.values():
        total.update(member.moves)
    return total


def _told_s(output: RequestOutput) -> float | None:
    """As `Retry-After` says it; None where it was taken."""
    if output.error_field != "unattainable":
        return None
    objective, feasible = output.metrics.objective, output.feasible
    assert objective is not None
    assert feasible is not None
    late_ms = (feasible.ttft_ms or 0.0) - (objective.ttft_ms or 0.0)
    return float(max(1, -(-late_ms // 1000)))


async def _served(
    router: ClusterRouter,
    asked: Asked,
    salt: str,
    number: int,
    objective: tuple[float, float] | None,
    rejects: bool,
) -> RequestOutput:
    REQUEST_ID.set(str(number))
    slo = objective and SLO(
        ttft_ms=objective[0],
        tpot_ms=objective[1],
        on_unattainable="reject" if rejects else "best_effort",
    )
    params = SamplingParams(
        max_new_tokens=asked.tokens, seed=asked.seed, ignore_eos=True, cache_salt=salt
    )
    args = Request(prompt=asked.prompt, params=params, speculation=None, slo=slo)
    async with streamed(router, [args]) as deltas:
        async for _, delta in deltas:
            if delta.output is not None:
                return delta.output
    raise AssertionError("a request ends with an output")


def requests_of(traces: Path | None, run: Run) -> list[Asked]:
    """One in a second, with lengths of Azure's conversations; drawn ones without `traces`."""
    trace: Sequence[Arrival] = ()
    if traces is not None:
        trace = read_trace(traces / "azure_2023_conv.csv", 30.0)
    times = RooflineTime(((1.0, 0.0, 0.0),))
    drawn = scenario_requests(SCENARIOS["ChatBot"], times, 1.0, run.count, run.seed, trace)
    return [
        Asked(
            one.at_s,
            _prompt(run.seed, number, min(_PROMPT, len(one.token_ids))),
            min(_OUTPUT, one.new_tokens),
            one.seed,
        )
        for number, one in enumerate(drawn)
    ]


def _prompt(seed: int, number: int, tokens: int) -> tuple[int, ...]:
    draws = random.Random(f"{seed} {number}")
    return tuple(draws.randrange(*_VOCABULARY) for _ in range(tokens))
