"""What tests of several packages share: few threads, a cache of their own, a family of models."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.exact.models import pool_settings, save_family
from tests.exact.report import prepare


def pytest_configure() -> None:
    # OMP_NUM_THREADS=1 is obeyed. Threads beyond the cores would only wait for each other.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    prepare(threads=max(1, min(2, torch.get_num_threads() // workers)))
    settings.register_profile("any-machine", deadline=None)
    settings.load_profile("any-machine")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What earlier runs measured of models is not found, and nothing is left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECROUTER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def small_family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of three Llamas that resemble one another, weakest first, in float64."""
    return save_family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="session")
def small_config(small_family: dict[str, Path]) -> dict[str, Any]:
    """A router's configuration over that family; copy it before changing it.

    Drafters are loaded when they are used, which spares most tests most of them.
    """
    engine = {"max_requests": 8, "max_model_len": 256, "prefill_chunk": 32, "preload": False}
    return {"pool": pool_settings(small_family), "engine": engine}
