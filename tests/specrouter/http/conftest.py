"""What the tests of the service have in common."""

from __future__ import annotations

import pytest

from specrouter.http.keys import API_KEY_VARIABLE


@pytest.fixture(autouse=True)
def no_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
