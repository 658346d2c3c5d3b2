"""Replicas of a cluster under load: what Ray costs, what routing is worth, and overload.

    python -m tests.service.cluster_load [--only overhead routing overload] [--venv DIR]

overhead: one replica on Ray beside an engine in this process, 8 streams each, in turns.
routing: two replicas, one of which waits after each forward as long as it computed; lengths of
Azure's conversations (`--traces`, else drawn) cut to 700 + 256; at the rate of which `round-robin`
attains half, policies take turns, with the same requests.
overload: the same replicas at four times the rate of which `slo` attains nine tenths, for 60 s,
with requests that ask to be rejected.

Runs in an environment of its own, beside the one of this process; wants a quiet machine. The last
line is JSON: medians over rounds of what is compared within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.service.environment import environment, extra, run_module
from tests.service.service import tiny_pool

if TYPE_CHECKING:
    from specrouter import ChainRouter, RouterConfig
    from specrouter.cluster.router import ClusterRouter
    from specrouter.engine.serving import ServingRouter
    from specrouter.request.output import RequestOutput
    from specrouter.sim.traces import Arrival

PARTS = ("overhead", "routing", "overload")
POLICIES = ("round-robin", "flowguard", "slo")
_INSIDE = "--inside"
_PROMPT, _OUTPUT = 700, 256  # tokens at most
_STREAMS, _STREAM_TOKENS = 8, 96
_SEARCH_REQUESTS = 60
_OVERLOAD, _OVERLOAD_S = 4.0, 60.0


@dataclass(frozen=True)
class Asked:
    at_s: float
    prompt: tuple[int, ...]
    tokens: int
    seed: int


@dataclass
class Found:
    """`told_s`, `true_s`: of refusals, when to ask again; until a prompt no shorter was taken."""

    outputs: list[RequestOutput] = field(default_factory=list)
    ages_within: float = 1.0
    told_s: list[float] = field(default_factory=list)
    true_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def attained(self) -> float:
        judged = [one.metrics.attained for one in self.outputs]
        return sum(one is True for one in judged) / max(1, len(judged))

    @property
    def goodput(self) -> float:
        """Requests in time per second of arrivals."""
        return sum(one.metrics.attained is True for one in self.outputs) / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.service.cluster_load", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--requests", type=int, default=200, help="of each policy and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=_OVERLOAD_S, help="of overload")
    parser.add_argument("--traces", type=Path, help="folder with azure_2023_conv.csv")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environment there")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        figures: dict[str, Any] = {}
        if "overhead" in arguments.only:
            figures["overhead"] = overhead(arguments)
        if {"routing", "overload"} & set(arguments.only):
            figures |= unequal(arguments)
        print(json.dumps(figures))
        return 0
    with environment(extra("cluster"), arguments.venv, is_beside=True) as python:
        return run_module(python, "tests.service.cluster_load", _INSIDE, *sys.argv[1:])


def make_replica(config: RouterConfig) -> ChainRouter:
    """In the replica's process. The one whose times are to be fresh waits as long as it computed,
    from before they are taken."""
    from specrouter import ChainRouter

    if config.engine.fresh_times:
        _slow_down()
    return ChainRouter.from_config(config)


def _slow_down() -> None:
    from modelpool.packed_model import PackedModel

    original = PackedModel.forward

    def forward(model: Any, *arguments: Any, **named: Any) -> Any:
        began_s = time.perf_counter()
        result = original(model, *arguments, **named)
        time.sleep(time.perf_counter() - began_s)
        return result

    setattr(PackedModel, "forward", forward)  # noqa: B010


def _cluster(replicas: Sequence[dict[str, Any]], policy: str) -> ClusterRouter:
    from specrouter import RouterConfig
    from specrouter.cluster.router import ClusterRouter
    from specrouter.cluster.serve_link import ServeHost

    section = {"replicas": list(replicas), "routing": {"policy": policy}}
    config = RouterConfig.load(tiny_pool(cluster=section, engine={"max_requests": 8}))
    return ClusterRouter(config, lambda: ServeHost(config, make_replica))


# What Ray costs


def overhead(arguments: argparse.Namespace) -> dict[str, float]:
    from specrouter import ChainRouter, RouterConfig

    alone = RouterConfig.load(tiny_pool(engine={"max_requests": 8}))
    ratios: dict[str, list[float]] = {"tpot_more_ms": [], "ttft_more_ms": [], "throughput": []}
    with ChainRouter(alone) as here, _cluster([{"name": "one"}], "slo") as there:
        for router in (here, there):
            asyncio.run(_streams(router, 0))
        for number in range(1, 3 * arguments.rounds + 1):
            ours, theirs = (asyncio.run(_streams(each, number)) for each in (here, there))
            ratios["tpot_more_ms"].append(theirs["tpot_ms"] - ours["tpot_ms"])
            ratios["ttft_more_ms"].append(theirs["ttft_ms"] - ours["ttft_ms"])
            ratios["throughput"].append(theirs["tokens_per_s"] / ours["tokens_per_s"])
    return {name: round(statistics.median(each), 3) for name, each in ratios.items()}


async def _streams(router: ServingRouter, seed: int) -> dict[str, float]:
    """8 at once, as a client sees them."""
    requests = [Asked(0.0, _prompt(seed, at, 64), _STREAM_TOKENS, at) for at in range(_STREAMS)]
    began_s = time.perf_counter()
    came = await asyncio.gather(*(_arrivals(router, one) for one in requests))
    seconds = time.perf_counter() - began_s
    tokens = sum(count for each in came for _, count in each)
    gaps = [(each[-1][0] - each[0][0]) / (_STREAM_TOKENS - each[0][1]) for each in came]
    return {
        "ttft_ms": 1000 * statistics.median(each[0][0] - began_s for each in came),
        "tpot_ms": 1000 * statistics.median(gaps),
        "tokens_per_s": tokens / seconds,
    }


async def _arrivals(router: ServingRouter, asked: Asked) -> list[tuple[float, int]]:
    from specrouter import SamplingParams
    from specrouter.engine.request_args import RequestArgs

    params = SamplingParams(max_new_tokens=asked.tokens, seed=asked.seed, ignore_eos=True)
    found = []
    async with aclosing(
        router.astream_each([RequestArgs(asked.prompt, params, None, None)])
    ) as deltas:
        async for _, delta in deltas:
            if delta.token_ids:
                found.append((time.perf_counter(), len(delta.token_ids)))
    return found


# Unequal replicas


def unequal(arguments: argparse.Namespace) -> dict[str, Any]:
    replicas: list[dict[str, Any]] = [
        {"name": "fast"},
        {"name": "slow", "engine": {"fresh_times": True}},
    ]
    figures: dict[str, Any] = {}
    with _cluster(replicas, "round-robin") as router:
        asyncio.run(_load(router, _requests(arguments, 1.0, 16), "round-robin"))  # warms up
        tpots = {
            name: member.state.tpot_at(1)
            for name, member in router._fleet.members.items()
            if member.state is not None
        }
        figures["predicted_tpot_ms"] = {name: round(each, 2) for name, each in tpots.items()}
        if "routing" in arguments.only:
            figures["routing"] = routing(router, arguments)
        if "overload" in arguments.only:
            figures["overload"] = overload(router, arguments)
    return figures


def routing(router: ClusterRouter, arguments: argparse.Namespace) -> dict[str, Any]:
    rate = _rate_of(router, arguments, "round-robin", 0.5)
    attained: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    within = []
    for number in range(arguments.rounds):
        requests = _requests(arguments, rate, arguments.requests, number)
        for policy in POLICIES:
            found = asyncio.run(_load(router, requests, policy))
            attained[policy].append(round(found.attained, 4))
            within.append(found.ages_within)
            print(f"  {rate:.2f}/s {policy}: {found.attained:.1%} in time", flush=True)
    base = attained["round-robin"]
    return {
        "requests_per_s": round(rate, 3),
        "attained": attained,
        "over_round_robin": {
            policy: round(statistics.median(a - b for a, b in zip(each, base, strict=True)), 4)
            for policy, each in attained.items()
        },
        "states_within_0.6_s": round(min(within), 4),
    }


def overload(router: ClusterRouter, arguments: argparse.Namespace) -> dict[str, Any]:
    rate = _rate_of(router, arguments, "slo", 0.9)
    count = round(arguments.seconds * rate)
    usual = asyncio.run(_load(router, _requests(arguments, rate, count), "slo"))
    many = _requests(arguments, _OVERLOAD * rate, round(_OVERLOAD * count))
    found = asyncio.run(_load(router, many, "slo", rejects=True))
    ratios = [told / true for told, true in zip(found.told_s, found.true_s, strict=True)]
    return {
        "capacity_requests_per_s": round(rate, 3),
        "goodput_ratio": round(found.goodput / usual.goodput, 3),
        "refused": sum(one.error_field == "unattainable" for one in found.outputs),
        "requests": len(found.outputs),
        "retry_within_2": round(sum(0.5 <= one <= 2.0 for one in ratios) / max(1, len(ratios)), 3),
        "states_within_0.6_s": round(found.ages_within, 4),
    }


def _rate_of(
    router: ClusterRouter, arguments: argparse.Namespace, policy: str, wanted: float
) -> float:
    """Requests per second of which the policy attains so much, by bisection."""
    low, high = 0.0, 0.0
    rate = 1.0
    for _ in range(7):
        found = asyncio.run(_load(router, _requests(arguments, rate, _SEARCH_REQUESTS), policy))
        print(f"  {rate:.2f}/s {policy}: {found.attained:.1%} in time", flush=True)
        low, high = (rate, high) if found.attained >= wanted else (low, rate)
        rate = (low + high) / 2 if high else 2 * rate
    return rate


async def _load(
    router: ClusterRouter, requests: Sequence[Asked], policy: str, rejects: bool = False
) -> Found:
    """Open loop."""
    from specrouter.cluster.state_ages import StateAges

    dispatcher = router._context.dispatcher
    dispatcher._config = dispatcher._config.model_copy(update={"policy": policy})
    dispatcher.ages = StateAges()
    found, began_s = Found(seconds=max(0.1, requests[-1].at_s)), time.perf_counter()
    log: list[tuple[float, int, float | None]] = []  # sent, prompt, told to wait; None: taken

    async def one(asked: Asked) -> None:
        await asyncio.sleep(max(0.0, began_s + asked.at_s - time.perf_counter()))
        sent_s = time.perf_counter()
        output = await _served(router, asked, rejects)
        found.outputs.append(output)
        log.append((sent_s, len(asked.prompt), _told_s(output)))

    await asyncio.gather(*map(one, requests))
    log.sort()
    for sent_s, prompt, told_s in log:
        later = (at - sent_s for at, size, told in log if told is None and size >= prompt)
        true_s = next((each for each in later if each > 0), None)
        if told_s is not None and true_s is not None:
            found.told_s.append(told_s)
            found.true_s.append(max(1.0, true_s))
    found.ages_within = dispatcher.ages.share_within(0.6)
    return found


def _told_s(output: RequestOutput) -> float | None:
    """As `Retry-After` says it; None where it was taken."""
    if output.error_field != "unattainable":
        return None
    objective, feasible = output.metrics.objective, output.feasible
    assert objective is not None
    assert feasible is not None
    late_ms = (feasible.ttft_ms or 0.0) - (objective.ttft_ms or 0.0)
    return float(max(1, -(-late_ms // 1000)))


async def _served(router: ClusterRouter, asked: Asked, rejects: bool) -> RequestOutput:
    from specrouter import SLO, SamplingParams
    from specrouter.engine.request_args import RequestArgs

    fast = next(iter(router._fleet.members.values())).state
    assert fast is not None
    slo = SLO(
        ttft_ms=3 * (len(asked.prompt) * fast.prefill_ms + fast.baseline_tpot_ms) + 200,
        tpot_ms=3 * fast.baseline_tpot_ms,
    )
    slo = replace(slo, on_unattainable="reject") if rejects else slo
    params = SamplingParams(max_new_tokens=asked.tokens, seed=asked.seed, ignore_eos=True)
    args = RequestArgs(asked.prompt, params, None, slo)
    async with aclosing(router.astream_each([args])) as deltas:
        async for _, delta in deltas:
            if delta.output is not None:
                return delta.output
    raise AssertionError("a request ends with an output")


def _requests(arguments: argparse.Namespace, rate: float, count: int, seed: int = 0) -> list[Asked]:
    from specrouter.profile.batch_time import RooflineTime
    from specrouter.sim.scenarios import SCENARIOS, scenario_requests
    from specrouter.sim.traces import read_trace

    trace: tuple[Arrival, ...] = ()
    if arguments.traces is not None:
        trace = tuple(read_trace(arguments.traces / "azure_2023_conv.csv", 30.0))
    times = RooflineTime(((1.0, 0.0, 0.0),))
    seed += arguments.seed
    drawn = scenario_requests(SCENARIOS["ChatBot"], times, rate, count, seed, trace)
    return [
        Asked(
            one.at_s,
            _prompt(seed, number, min(_PROMPT, len(one.token_ids))),
            min(_OUTPUT, one.new_tokens),
            one.seed,
        )
        for number, one in enumerate(drawn)
    ]


def _prompt(seed: int, number: int, tokens: int) -> tuple[int, ...]:
    draws = random.Random(f"{seed} {number}")
    return tuple(draws.randrange(300, 2000) for _ in range(tokens))


if __name__ == "__main__":
    sys.exit(main())
