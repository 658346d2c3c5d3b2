"""Replicas of a cluster under load: what routing is worth, and overload.

    python -m checks.service.cluster_load [--only routing overload] [--save FILE --seconds 400]
        [--venv DIR]

Two replicas on Ray, one of which waits after each forward as long as it computed; lengths of
Azure's conversations (`--traces`, else drawn) cut to 700 + 256.

routing: at the least load of which `round-robin` attains about half, policies take turns, with the
same requests. It attains about half over a wide range of loads, all that goes to the fast one and
little else: where the slow one is late, and up to where the fast one is late as well. Beyond what
both together can serve no policy gains much. The first requests of a run are not judged.
overload: at four times the load of which `slo` attains nine tenths, for 60 s, with requests that
ask to be rejected.

Loads are times what the two would serve one request at a time, and objectives are multiples of the
fast one's times for a request alone (5, as those of SLOs-Serve's ChatBot). Both are measured at
each start, since the machine's speed drifts. Each round, and each run of overload, is saved to a
file as it ends; the same command goes on from there. `--seconds` begins none that would end later:
the exit code is then 3.

Runs in an environment of its own, beside the one of this process; wants a quiet machine. The last
line is JSON: medians over rounds of what is compared within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checks.service.cluster_runs import Alone, Asked, Run, alone, load, requests_of
from checks.service.environment import add_cluster_options, run_in_cluster
from checks.service.rate_search import rate_of
from checks.service.saved import OutOfTimeError, Saved
from checks.service.service import tiny_pool

if TYPE_CHECKING:
    from specrouter import ChainRouter, RouterConfig
    from specrouter.cluster.router import ClusterRouter

PARTS = ("routing", "overload")
POLICIES = ("round-robin", "flowguard", "slo")
_PROBE, _WARM_UP, _ALONE = 40, 24, 8  # requests
_SETTLES = 20  # of each run that counts, not judged
_ALONE_OUTPUT = 64  # tokens of each of the latter
_WARM_UP_SEED = 10_000
_ABOUT_HALF = 0.6  # what goes to the fast one, and a fifth of the rest: in a run queues grow first
_GUESSES = {"round-robin": 1.4, "slo": 1.2}  # loads
_OVERLOAD, _OVERLOAD_S = 4.0, 60.0
_REST_S = 15.0  # a run's last requests
_AGAIN = 3  # the exit code where runs are left


@dataclass(frozen=True)
class Site:
    """Two replicas. `alone`: what they take for a request alone, the fast one first."""

    router: ClusterRouter
    arguments: argparse.Namespace
    alone: tuple[Alone, Alone]

    def run(self, run: Run) -> dict[str, Any]:
        """Its figures, for the file."""
        asked, rate = self._asked(run)
        return {
            "requests_per_s": round(rate, 3),
            "alone": [[round(one.prefill_ms, 3), round(one.tpot_ms, 2)] for one in self.alone],
            **asyncio.run(load(self.router, asked, run, self.alone[0].objective)),
        }

    def takes_s(self, run: Run) -> float:
        return self._asked(run)[0][-1].at_s + _REST_S

    def rate(self, run: Run) -> float:
        """Requests/s of the run."""
        return self._asked(run)[1]

    def _asked(self, run: Run) -> tuple[list[Asked], float]:
        """Its requests, and how many come in a second."""
        asked = requests_of(self.arguments.traces, run)
        rate = run.load * sum(one.rate(asked) for one in self.alone)
        return [replace(one, at_s=one.at_s / rate) for one in asked], rate


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.cluster_load", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--requests", type=int, default=200, help="of each policy and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--overload-s", type=float, default=_OVERLOAD_S, help="of overload")
    parser.add_argument(
        "--loads", nargs=2, type=float, metavar="X", help="of routing and overload; else searched"
    )
    parser.add_argument("--traces", type=Path, help="folder with azure_2023_conv.csv")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="FILE", help="of what has been measured")
    parser.add_argument("--seconds", type=float, help="after which no run ends")
    add_cluster_options(parser)
    arguments = parser.parse_args()
    code = run_in_cluster("checks.service.cluster_load", arguments)
    if code is not None:
        return code
    try:
        print(json.dumps(measure(arguments, Saved(arguments.save, arguments.seconds))))
    except OutOfTimeError as error:
        print(f"no time is left for {error}; the same command goes on", flush=True)
        return _AGAIN
    return 0


def measure(arguments: argparse.Namespace, saved: Saved) -> dict[str, Any]:
    figures = {}
    with _unequal() as router:
        site = _warmed_up(router, arguments)
        if "routing" in arguments.only:
            figures["routing"] = routing(site, saved)
        if "overload" in arguments.only:
            figures["overload"] = overload(site, saved)
    return figures


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


def _unequal() -> ClusterRouter:
    from specrouter import RouterConfig
    from specrouter.cluster.router import ClusterRouter
    from specrouter.cluster.serve_link import ServeHost

    replicas = [{"name": "fast"}, {"name": "slow", "engine": {"fresh_times": True}}]
    section = {"replicas": replicas, "routing": {"policy": "round-robin"}}
    config = RouterConfig.load(tiny_pool(cluster=section, engine={"max_requests": 8}))
    return ClusterRouter(config, lambda: ServeHost(config, make_replica))


def _warmed_up(router: ClusterRouter, arguments: argparse.Namespace) -> Site:
    """Both have learnt how fast they are, from requests like those that count."""
    run = Run(policy="round-robin", load=_GUESSES["slo"], count=_WARM_UP, seed=_WARM_UP_SEED)
    asked = requests_of(arguments.traces, run)[:_ALONE]
    few = [replace(one, tokens=min(one.tokens, _ALONE_OUTPUT)) for one in asked]
    found = asyncio.run(alone(router, few))
    Site(router, arguments, (found["fast"], found["slow"])).run(run)
    found = asyncio.run(alone(router, few))
    for name, one in found.items():
        print(
            f"{name}: {one.prefill_ms:.3f} ms for a token of a prompt, {one.tpot_ms:.2f} of the "
            f"output; it tells {one.told_ms[0]:.2f}, and {one.told_ms[1]:.2f} with all rows busy",
            flush=True,
        )
    return Site(router, arguments, (found["fast"], found["slow"]))


def routing(site: Site, saved: Saved) -> dict[str, Any]:
    arguments = site.arguments
    share = _load_of(site, saved, "round-robin", _ABOUT_HALF)
    rounds: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for number in range(arguments.rounds):
        first = number % len(POLICIES)  # who comes first: the machine drifts
        for one in _saved_round(site, saved, share, number, (*POLICIES[first:], *POLICIES[:first])):
            rounds[one["policy"]].append(one)
    attained = {policy: [one["attained"] for one in each] for policy, each in rounds.items()}
    base = attained["round-robin"]
    return {
        "load": round(share, 4),
        "attained": attained,
        "over_round_robin": {
            policy: round(statistics.median(a - b for a, b in zip(each, base, strict=True)), 4)
            for policy, each in attained.items()
        },
        "states_within_0.6_s": min(
            one["states_within_0.6_s"] for one in itertools.chain(*rounds.values())
        ),
    }


def _saved_round(
    site: Site, saved: Saved, share: float, number: int, policies: Sequence[str]
) -> list[dict[str, Any]]:
    """In one go: what a load and an objective are is measured at each start."""
    asked = site.arguments
    count, seed = asked.requests + _SETTLES, asked.seed + number
    runs = [
        Run(policy=policy, load=share, count=count, seed=seed, settles=_SETTLES)
        for policy in policies
    ]
    name = f"round {number + 1}, load {share:.3f}"

    def served() -> list[dict[str, Any]]:
        found = []
        for run in runs:
            found.append({"policy": run.policy, **site.run(run)})
            print(f"  {name}: {json.dumps(found[-1])}", flush=True)
        return found

    return saved.step(name, sum(map(site.takes_s, runs)), served)


def overload(site: Site, saved: Saved) -> dict[str, Any]:
    share = _load_of(site, saved, "slo", 0.9)
    seed = site.arguments.seed
    rate = site.rate(Run(policy="slo", load=share, count=_PROBE, seed=seed))
    count = max(_PROBE, round(site.arguments.overload_s * rate))
    usual = _saved_run(
        site, saved, "capacity", Run(policy="slo", load=share, count=count, seed=seed)
    )
    run = Run(
        policy="slo",
        load=_OVERLOAD * share,
        count=round(_OVERLOAD * count),
        seed=seed,
        rejects=True,
    )
    found = _saved_run(site, saved, "overload", run)
    return {
        "load": round(share, 4),
        "goodput_ratio": round(_OVERLOAD * found["attained"] / usual["attained"], 3),
        **{name: found[name] for name in ("requests", "refused", "retry_within_2")},
        "states_within_0.6_s": found["states_within_0.6_s"],
    }


def _load_of(site: Site, saved: Saved, policy: str, wanted: float) -> float:
    """Of which the policy attains so much."""
    if site.arguments.loads is not None:
        return float(site.arguments.loads[list(_GUESSES).index(policy)])

    def share_at(share: float) -> float:
        run = Run(policy=policy, load=share, count=_PROBE, seed=site.arguments.seed)
        return float(_saved_run(site, saved, "probe", run)["attained"])

    return rate_of(share_at, _GUESSES[policy], wanted)


def _saved_run(site: Site, saved: Saved, label: str, run: Run) -> dict[str, Any]:
    name = f"{label}: {run.policy}, load {run.load:.3f}"
    is_new = name not in saved.steps
    found = saved.step(name, site.takes_s(run), partial(site.run, run))
    if is_new:
        print(f"  {name}: {json.dumps(found)}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
