"""The cache is where its variables say, ours before the desktop's."""

from pathlib import Path

import pytest

from modelpool.checkpoint.cache_dir import cache_dir


def test_the_first_of_three_places_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECROUTER_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("SPECROUTER_CACHE")
    assert cache_dir() == tmp_path / "shared" / "specrouter"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / "home" / ".cache" / "specrouter"
