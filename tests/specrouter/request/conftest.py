"""A router of the small family, which drafts from the text itself, too."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from specrouter import ChainRouter


@pytest.fixture(scope="module")
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    settings = copy.deepcopy(small_config)
    settings["pool"]["models"].append({"name": "ngram", "source": "ngram"})
    with ChainRouter.from_config(settings) as opened:
        yield opened
