"""What tests of several packages share: few threads, a cache of their own, a family of models."""

import functools
import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import pure
from tests.kept_logging import kept_logging


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help=pure.HELP)
    shuffle = "modules, and tests within each of them, in an order drawn from this seed"
    parser.addoption("--shuffle", type=int, metavar="SEED", help=shuffle)
    lives = "random lives of rows in each of the exact tests of them (default: 5000)"
    parser.addoption("--lives", type=int, default=5_000, metavar="N", help=lives)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _prepare_models()
    slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("any-machine", slow)
    settings.register_profile(pure.FAST_PROFILE, slow, max_examples=pure.MAX_EXAMPLES)
    settings.load_profile(pure.FAST_PROFILE if config.getoption("--fast") else "any-machine")


def _prepare_models() -> None:
    """Not where workers are started, which wait meanwhile: it takes seconds to import."""
    import torch
    import transformers

    from test_support import triton_interpreter  # noqa: F401 (before anything imports Triton)

    # OMP_NUM_THREADS=1 is obeyed. Threads beyond the cores would only wait for each other.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, min(2, torch.get_num_threads() // workers)))
    progress_bars: Any = transformers.utils.logging
    progress_bars.disable_progress_bar()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        _shuffle(items, random.Random(seed))
    if not config.getoption("--fast"):
        return
    long = [one for one in items if any(map(one.get_closest_marker, pure.LONG_MARKS))]
    config.hook.pytest_deselected(items=long)
    items[:] = [one for one in items if one not in set(long)]


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests: to search half a million objects for garbage takes 0.4 s


def _shuffle(items: list[pytest.Item], draws: random.Random) -> None:
    """A module's tests stay together, and share its fixtures."""
    modules = sorted({one.path for one in items})
    draws.shuffle(modules)
    draws.shuffle(items)
    place = {path: number for number, path in enumerate(modules)}
    items.sort(key=lambda one: place[one.path])


@pytest.fixture(scope="session", autouse=True)
def own_cache(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[None]:
    """What earlier runs measured of models is not found, and nothing is left behind.

    The C library is compiled once for all workers of a run: its file is named by source, flags and
    compiler, and put there in one step.
    """
    own, base = tmp_path_factory.mktemp("cache"), tmp_path_factory.getbasetemp()
    shared = (base.parent if hasattr(pytestconfig, "workerinput") else base) / "kernels"
    shared.mkdir(mode=0o700, exist_ok=True)
    (own / "kernels").symlink_to(shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECROUTER_CACHE", str(own))
        yield


@pytest.fixture(scope="session", autouse=True)
def lane(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --fast, a test that would load a model or start a process is skipped there."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--fast"):
            pure.skip_what_takes_long(patch)
        yield


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    with kept_logging():
        yield


@pytest.fixture(scope="module", autouse=True)
def briefly_timed() -> Iterator[None]:
    """Models are timed within a tenth of a second, not three, and kept times are not compared with
    the machine of now: no text depends on how good they are."""
    from specrouter.execution import model_times
    from specrouter.execution.time_profile import profile_model

    with pytest.MonkeyPatch.context() as patch:
        briefly = functools.partial(profile_model, budget_s=0.1)
        patch.setattr(model_times, "profile_model", briefly)
        patch.setattr(model_times, "factor_now", lambda curve, model: 1.0)
        yield


@pytest.fixture(scope="session")
def small_family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of three Llamas that resemble one another, weakest first, in float64."""
    from test_support.families import save_family

    return save_family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="session")
def small_config(small_family: dict[str, Path]) -> dict[str, Any]:
    """A router's configuration over that family; copy it before changing it.

    Drafters are loaded when they are used, which spares most tests most of them.
    """
    from test_support.families import pool_settings

    engine = {"max_requests": 8, "max_model_len": 256, "prefill_chunk": 32, "preload": False}
    return {"pool": pool_settings(small_family), "engine": engine}
