"""Engines in processes of their own, as contenders that take turns: for comparing configurations.

Each process has one router and its OpenMP threads. It loads its models when it first runs.
"""

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from modelpool.config import Weights
from research.bench.recorded import RecordedContender
from specrouter import ChainRouter
from specrouter.bench.figures import Sample
from specrouter.bench.prompts import Work
from specrouter.config import RouterConfig


def target_settings(config: Path, weights: Weights, rows: int) -> dict[str, Any]:
    """A configuration with such weights of its target, on the CPU, and so many rows."""
    settings = RouterConfig.load(config).model_dump()
    settings["engine"].update(max_requests=rows)
    for model in settings["pool"]["models"]:
        if model["name"] == settings["pool"]["target"]:
            model.update(weights=weights, device="cpu")
    return settings


_router: list[ChainRouter] = []  # of an engine's process, which has one


def engine(settings: Mapping[str, Any]) -> ProcessPoolExecutor:
    """Of a configuration; closed with its process."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, initializer=_open, initargs=(settings,))


class Served:
    """A contender that is an engine in another process, under a policy."""

    def __init__(self, name: str, of: ProcessPoolExecutor, policy: str) -> None:
        self.name = name
        self._engine, self._policy = of, policy

    def run(self, work: Work) -> Sample:
        return self._engine.submit(_run, self.name, self._policy, work).result()


def _open(settings: Mapping[str, Any]) -> None:
    _router.append(ChainRouter.from_config(settings))


def _run(name: str, policy: str, work: Work) -> Sample:
    return RecordedContender(name, _router[0], policy).run(work)
