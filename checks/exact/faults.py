"""Random bursts of requests on small random models that fail, come and go.

Families of all architectures in float64, with an n-gram drafter. Requests join at random times
under chains and trees of their own, are cancelled, streamed, resumed; drafters raise,
run out of memory or give NaN at random cycles and are evicted; in some bursts the target
fails. Every burst has one of the scheduler's policies and selections of nodes, which are
switched on the router between; requests have objectives, some that nothing can attain.
Every output must be the oracle's (its beginning, for requests that were cancelled or that the
target failed), and the router whole after each burst.

A failure names its lifetime: `--first-lifetime N --runs 20` plays that one alone.
"""

import logging
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from checks.exact.arguments import oracle_of
from checks.exact.arrangement import SELECTIONS, chains
from checks.exact.burst import draw_burst, draw_cases, draw_shape, play
from checks.exact.comparison import Case
from checks.exact.fault_injection import FaultInjection, restless_scheduler
from checks.exact.report import Progress, finish, make_parser, prepare
from modelpool import ModelPool
from specrouter import ChainRouter
from specrouter.request.params import Chain
from test_support.families import SAVERS, pool_settings, save_family
from test_support.routers import assert_whole

BURSTS = 20  # of one router's lifetime
POLICIES = ("paper", "static", "smallest", "target-only")
_CASES = 60  # requests that the bursts of one family draw from
_TARGET_FAULTS = 0.05  # of the bursts
_SHOWN = 5


class Family:
    """An architecture's models and the requests to be served by them."""

    def __init__(self, architecture: str, directory: Path) -> None:
        self.paths = save_family(directory, architecture, noise=0.05, seed=11)
        pool = ModelPool.from_config(pool_settings(self.paths))
        oracle = oracle_of(pool, "float64")
        self.cases: list[Case] = draw_cases(oracle, _CASES, np.random.default_rng(12))

    def open_router(
        self,
        max_loaded_models: int | None = None,
        max_requests: int = 4,
        prefill_chunk: int = 16,
    ) -> ChainRouter:
        pool = pool_settings(self.paths, max_loaded_models=max_loaded_models)
        pool["models"].append({"name": "ngram", "source": "ngram"})
        engine = {
            "max_requests": max_requests,
            "max_model_len": 128,
            "prefill_chunk": prefill_chunk,
            "preload": False,  # every router would time its drafters
        }
        return ChainRouter.from_config({"pool": pool, "engine": engine})


class FaultCheck:
    """Plays lifetimes and counts what happened in them."""

    def __init__(self, seed: int, progress: Progress) -> None:
        self.seed = seed
        self.progress = progress
        self.endings: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.failures: list[str] = []

    def play_lifetime(self, family: Family, lifetime: int, bursts: int = BURSTS) -> None:
        """A router's bursts; ends at the first that goes wrong."""
        rng = np.random.default_rng([self.seed, lifetime])
        faults = FaultInjection(int(rng.integers(2**32)))
        drafter_rate = float(rng.choice([0.0, 0.01, 0.03, 0.1]))
        router = family.open_router(
            # Sometimes fewer models than requests name, so that they evict one another.
            max_loaded_models=None if rng.random() < 0.8 else 2,
            # Mostly fewer requests at a time than a burst has, so that some wait.
            max_requests=int(rng.integers(2, 7)),
            # Small chunks have drafters catch up for most of a text.
            prefill_chunk=int(rng.choice([4, 16, 64])),
        )
        with restless_scheduler(lifetime), faults.installed(), router:
            for burst in range(bursts):
                policy = draw_policy(router, rng)
                try:
                    router.set_policy(**policy)
                    self._play_burst(router, family, faults, drafter_rate, rng)
                except Exception as error:
                    where = f"lifetime {lifetime}, burst {burst}, {policy}"
                    self.failures.append(f"{where}: {type(error).__name__}: {error}")
                    break
                self.progress(f"{len(self.failures)} failed")
        self.raised += faults.raised
        self.kinds += faults.kinds

    def _play_burst(
        self,
        router: ChainRouter,
        family: Family,
        faults: FaultInjection,
        drafter_rate: float,
        rng: np.random.Generator,
    ) -> None:
        pool = router.pool
        drafters = [name for name in pool.names if name != pool.target]
        target_fails = bool(rng.random() < _TARGET_FAULTS)
        faults.rates = dict.fromkeys(drafters, drafter_rate)
        faults.rates[pool.target] = 0.1 if target_fails else 0.0
        evict = str(rng.choice(drafters)) if rng.random() < 0.1 else None
        plans = draw_burst(family.cases, chains_that_fit(pool), rng)
        outputs = play(router, plans, evict, may_fail=target_fails)
        self.endings.update(output.finish_reason for output in outputs)
        faults.rates = {}
        assert_whole(router)


def chains_that_fit(pool: ModelPool) -> list[Chain]:
    """Others are refused."""
    found = chains(pool.names, pool.target, pool.parameter_count)
    return [chain for chain in found if pool.fit_together(chain)]


def draw_policy(router: ChainRouter, rng: np.random.Generator) -> dict[str, Any]:
    """Arguments of `set_policy`: half of them adaptive; most with settings of the trees."""
    pool = router.pool
    policy = str(rng.choice(["adaptive", *POLICIES])) if rng.random() < 0.6 else "adaptive"
    depth, width = draw_shape(rng)
    settings: dict[str, Any] = {"policy": policy}
    if policy != "adaptive":
        settings.update(depth=depth, width=width)
    if policy == "static":
        fitting = chains_that_fit(pool)
        settings["chain"] = fitting[int(rng.integers(len(fitting)))]
    if rng.random() < 0.2:
        settings["nodes"] = int(rng.integers(1, depth * width + 1))
    if rng.random() < 0.7:
        settings["trees"] = draw_trees(rng)
    return settings


def draw_trees(rng: np.random.Generator) -> dict[str, Any]:
    """Settings of the section `trees`."""
    trees: dict[str, Any] = {"selection": str(rng.choice(SELECTIONS))}
    if rng.random() < 0.7:
        trees["budget_tokens"] = int(rng.integers(1, 100))
    return trees


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=2_000, help="bursts, over all families")
    parser.add_argument("--first-lifetime", type=int, default=0)
    parser.add_argument("--step", type=int, default=1, help="from a lifetime to the next")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    prepare(options.threads)
    logging.disable(logging.WARNING)  # one for every injected failure
    started = time.monotonic()
    check = FaultCheck(options.seed, Progress("faults", options.runs))
    numbers = range(-(-options.runs // BURSTS))
    lifetimes = [options.first_lifetime + options.step * number for number in numbers]
    names = list(SAVERS)
    architecture_of = {each: names[each % len(names)] for each in lifetimes}
    with TemporaryDirectory() as directory:
        few = set(architecture_of.values())
        families = {name: Family(name, Path(directory) / name) for name in few}
        for lifetime, name in architecture_of.items():
            check.play_lifetime(families[name], lifetime)
    figures = {
        "runs": check.progress.done,
        "requests": sum(check.endings.values()),
        "endings": dict(check.endings),
        "faults_raised": dict(check.raised),
        "kinds": dict(check.kinds),
        "failures": len(check.failures),
        "examples": check.failures[:_SHOWN],
    }
    passed = not check.failures and check.progress.done >= options.runs
    return finish("faults", passed, started, figures)


if __name__ == "__main__":
    sys.exit(main())
