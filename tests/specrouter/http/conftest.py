"""What the tests of the service have in common."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from specrouter import ChainRouter
from specrouter.http_client import API_KEY_VARIABLE


@pytest.fixture(autouse=True)
def no_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


@pytest.fixture(scope="package")
def small_router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    """Of the small family, which drafts from the text itself, too. Chats have 512 tokens."""
    settings = copy.deepcopy(small_config)
    settings["pool"]["models"].append({"name": "ngram", "source": "ngram"})
    settings["engine"] |= {"max_requests": 16, "max_model_len": 512}
    with ChainRouter.from_config(settings) as router:
        yield router
