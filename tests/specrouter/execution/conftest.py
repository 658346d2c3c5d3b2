"""Three models that resemble one another, weakest first: `small`, `middle`, `target`."""

from typing import Any

import pytest

from modelpool import ModelPool


@pytest.fixture(scope="module")
def pool(small_config: dict[str, Any]) -> ModelPool:
    return ModelPool.from_config(small_config["pool"])
