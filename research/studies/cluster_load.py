"""Replicas of a cluster under load: what routing is worth, and overload.

    python -m research.studies.cluster_load [--only routing overload] [--loads 1.8 1.2]

Two replicas on Ray, one of which waits after each forward as long as it computed; lengths of
Azure's conversations (`--traces`, else drawn) cut to 700 + 256.

routing: policies take turns with the same requests, at the first of `--loads`: the least of which
`round-robin` attains about half. It does so over a wide range of loads, as all goes to the fast one
and little else: where the slow one is late, and up to where the fast one is late as well. Beyond
what both together can serve no policy gains much. The first requests of a run are not judged.
overload: at four times the second of `--loads`, of which `slo` attains about nine tenths, for 60 s,
with requests that ask to be rejected.

Loads are times what the two would serve one request at a time, and objectives are multiples of the
fast one's times for a request alone (5, as those of SLOs-Serve's ChatBot). Both are measured at
each start, since the machine's speed drifts.

Runs where `specrouter[cluster]` is installed; wants a quiet machine. The last line is JSON: medians
over rounds of what is compared within a round.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelpool.packed_model import PackedModel
from research.studies.cluster_runs import Alone, Asked, Run, alone, load, requests_of
from specrouter import ChainRouter, RouterConfig
from specrouter.cluster.router import ClusterRouter

PARTS = ("routing", "overload")
_MODELS = ("tiny-1m", "tiny-1m-code", "tiny-1m-math", "tiny-3m", "tiny-8m")
POLICIES = ("round-robin", "flowguard", "slo")
_LEAST, _WARM_UP, _ALONE = 40, 24, 8  # requests
_SETTLES = 20  # of each run that counts, not judged
_ALONE_OUTPUT = 64  # tokens of each of the latter
_WARM_UP_SEED = 10_000
_LOADS = (1.8, 1.2)  # of routing and overload
_OVERLOAD, _OVERLOAD_S = 4.0, 60.0


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

    def rate(self, run: Run) -> float:
        """Requests/s of the run."""
        return self._asked(run)[1]

    def _asked(self, run: Run) -> tuple[list[Asked], float]:
        """Its requests, and how many come in a second."""
        asked = requests_of(self.arguments.traces, run)
        rate = run.load * sum(one.rate(asked) for one in self.alone)
        return [replace(one, at_s=one.at_s / rate) for one in asked], rate


def main() -> int:
    parser = argparse.ArgumentParser(prog="research.studies.cluster_load", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--requests", type=int, default=200, help="of each policy and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--overload-s", type=float, default=_OVERLOAD_S, help="of overload")
    parser.add_argument(
        "--loads", nargs=2, type=float, metavar="X", default=_LOADS, help="of routing and overload"
    )
    parser.add_argument("--traces", type=Path, help="folder with azure_2023_conv.csv")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(measure(parser.parse_args())))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    figures = {}
    with _unequal() as router:
        site = _warmed_up(router, arguments)
        if "routing" in arguments.only:
            figures["routing"] = routing(site)
        if "overload" in arguments.only:
            figures["overload"] = overload(site)
    return figures


def make_replica(config: RouterConfig) -> ChainRouter:
    """In the replica's process. The one whose times are to be fresh waits as long as it computed,
    from before they are taken."""
    if config.engine.fresh_times:
        _slow_down()
    return ChainRouter.from_config(config)


def _slow_down() -> None:
    original = PackedModel.forward

    def forward(model: Any, *arguments: Any, **named: Any) -> Any:
        began_s = time.perf_counter()
        result = original(model, *arguments, **named)
        time.sleep(time.perf_counter() - began_s)
        return result

    setattr(PackedModel, "forward", forward)  # noqa: B010


def _unequal() -> ClusterRouter:
    from specrouter.cluster.serve_link import ServeHost  # imports Ray

    replicas = [{"name": "fast"}, {"name": "slow", "engine": {"fresh_times": True}}]
    section = {"replicas": replicas, "routing": {"policy": "round-robin"}}
    models = [{"name": name, "source": f"bundled:{name}"} for name in _MODELS]
    pool = {"target": _MODELS[-1], "models": models}
    engine = {"max_requests": 8, "max_model_len": 1024}
    config = RouterConfig.load({"pool": pool, "engine": engine, "cluster": section})
    return ClusterRouter(config, lambda: ServeHost(config, make_replica))


def _warmed_up(router: ClusterRouter, arguments: argparse.Namespace) -> Site:
    """Both have learnt how fast they are, from requests like those that count."""
    run = Run(policy="round-robin", load=_LOADS[1], count=_WARM_UP, seed=_WARM_UP_SEED)
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


def routing(site: Site) -> dict[str, Any]:
    arguments, share = site.arguments, site.arguments.loads[0]
    rounds: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for number in range(arguments.rounds):
        first = number % len(POLICIES)  # who comes first: the machine drifts
        for policy in (*POLICIES[first:], *POLICIES[:first]):
            run = Run(
                policy=policy,
                load=share,
                count=arguments.requests + _SETTLES,
                seed=arguments.seed + number,
                settles=_SETTLES,
            )
            rounds[policy].append(_told(site, f"round {number + 1}", run))
    attained = {policy: [one["attained"] for one in each] for policy, each in rounds.items()}
    base = attained["round-robin"]
    return {
        "load": share,
        "attained": attained,
        "over_round_robin": {
            policy: round(statistics.median(a - b for a, b in zip(each, base, strict=True)), 4)
            for policy, each in attained.items()
        },
        "states_within_0.6_s": min(
            one["states_within_0.6_s"] for one in itertools.chain(*rounds.values())
        ),
    }


def overload(site: Site) -> dict[str, Any]:
    share, seed = site.arguments.loads[1], site.arguments.seed
    usual = Run(policy="slo", load=share, count=_LEAST, seed=seed)
    usual = replace(usual, count=max(_LEAST, round(site.arguments.overload_s * site.rate(usual))))
    more = replace(
        usual, load=_OVERLOAD * share, count=round(_OVERLOAD * usual.count), rejects=True
    )
    capacity, found = _told(site, "capacity", usual), _told(site, "overload", more)
    return {
        "load": share,
        "goodput_ratio": round(_OVERLOAD * found["attained"] / capacity["attained"], 3),
        **{name: found[name] for name in ("requests", "refused", "retry_within_2")},
        "states_within_0.6_s": found["states_within_0.6_s"],
    }


def _told(site: Site, label: str, run: Run) -> dict[str, Any]:
    found = site.run(run)
    print(f"  {label}: {run.policy}, load {run.load:.3f}: {json.dumps(found)}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
