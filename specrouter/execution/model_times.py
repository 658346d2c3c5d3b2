"""ModelTimes: where the curves of models come from, and where they are kept.

A model that is used for the first time is timed (`time_profile`), unless an earlier process has
kept its times and they are still true. What serving learns beyond that is not kept: it may be of
an hour in which the machine had other work.
"""

import logging
import time
from pathlib import Path
from typing import Any

from modelpool import ModelPool
from modelpool.checkpoint.cache_dir import cache_dir
from modelpool.checkpoint.json_cache import JsonCache
from modelpool.fast.model_key import key_of
from modelpool.packed_model import PackedModel
from specrouter.execution.time_profile import is_too_slow, profile_model
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.time_regression import TimeRegression

logger = logging.getLogger(__name__)


class ModelTimes:
    """Args: `is_fresh`: models are timed anew, whatever was kept."""

    def __init__(
        self, pool: ModelPool, profiler: PerformanceProfiler, is_fresh: bool = False
    ) -> None:
        self._pool = pool
        self._profiler = profiler
        self._cache = TimeCache(cache_dir() / "times")
        self._is_fresh = is_fresh
        self._keys: dict[str, str] = {}  # of what each model's curve was last taken of

    def learn(self, name: str, model: PackedModel) -> None:
        """Tells the profiler how long a model's forwards take, if it does not know of the model as
        it is now: one that is loaded again may be elsewhere. Runs some of them."""
        key = key_of(model, self._pool.path(name))
        if self._keys.get(name) == key:
            return
        self._pool.progress.begin("timing", name)
        times = None if self._is_fresh else self._cache.load(key)
        curve = None if times is None else times.curve()
        if times is None or curve is None or is_too_slow(curve, model):
            started = time.perf_counter()
            times = TimeRegression.profiled(profile_model(model))
            self._cache.store(key, times)
            logger.info("timed %s in %.1f s", name, time.perf_counter() - started)
        self._profiler.learn_curve(name, times, model.sizes)
        self._keys[name] = key


class TimeCache:
    """One file per key in a folder, which need not exist. A file of no use costs a profile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept = JsonCache(folder, "times")

    def load(self, key: str) -> TimeRegression | None:
        """None where nothing of use is kept; the warning says why, if there is a file."""
        return self._kept.load(key, _times)

    def store(self, key: str, times: TimeRegression) -> None:
        self._kept.store(key, times.to_json())


def _times(kept: Any) -> TimeRegression:
    times = TimeRegression.from_json(kept)
    times.curve()  # of what can be read and makes no sense
    return times
