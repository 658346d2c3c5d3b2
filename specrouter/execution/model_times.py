"""The time curves of models, and the cache that keeps them between processes.

A model that is used for the first time is timed (`time_profile`), unless an earlier process has
kept its times and they are still valid. Times learned while serving are not kept, because the
machine may have had other work then.
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
from specrouter.execution.time_profile import factor_now, profile_model
from specrouter.profile.profiler import PerformanceProfiler
from specrouter.profile.time_regression import TimeRegression

logger = logging.getLogger(__name__)


class ModelTimes:
    """Times of the models of a pool; `is_fresh`: models are timed anew, without the cache."""

    def __init__(
        self, pool: ModelPool, profiler: PerformanceProfiler, is_fresh: bool = False
    ) -> None:
        self._pool = pool
        self._profiler = profiler
        self._cache = TimeCache(cache_dir() / "times")
        self._is_fresh = is_fresh
        self._keys: dict[str, str] = {}  # keys of the models as they were last timed

    def learn(self, name: str, model: PackedModel) -> None:
        """Give the profiler a model's time curve, unless it has that of the model as it is now.

        A model that is loaded again may be on another device. Runs some forwards.
        """
        key = key_of(model, self._pool.path(name))
        if self._keys.get(name) == key:
            return
        self._pool.progress.begin("timing", name)
        times = None if self._is_fresh else self._cache.load(key)
        curve = None if times is None else times.curve()
        factor = None if curve is None else factor_now(curve, model)
        if times is not None and factor is not None:
            times.scale(factor)
        else:
            started = time.perf_counter()
            times = TimeRegression.profiled(profile_model(model))
            self._cache.store(key, times)
            logger.info("timed %s in %.1f s", name, time.perf_counter() - started)
        self._profiler.learn_curve(name, times, model.sizes)
        self._keys[name] = key


class TimeCache:
    """A cache with one file per key, in a folder that need not exist; bad files are ignored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept = JsonCache(folder, "times")

    def load(self, key: str) -> TimeRegression | None:
        """Return the kept times, or None; for an unusable file, a warning gives the reason."""
        return self._kept.load(key, _times)

    def store(self, key: str, times: TimeRegression) -> None:
        self._kept.store(key, times.to_json())


def _times(kept: Any) -> TimeRegression:
    times = TimeRegression.from_json(kept)
    times.curve()  # raises for values that can be parsed but are invalid
    return times
