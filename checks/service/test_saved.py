"""A measurement that is cut off goes on where it ended."""

from pathlib import Path

import pytest

from checks.service.saved import OutOfTimeError, Saved


def test_a_step_that_was_saved_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    assert Saved(path).step("one", 1.0, lambda: [0.5]) == [0.5]
    again = Saved(path)
    assert again.step("one", 1.0, lambda: [1.5]) == [0.5]
    assert again.step("two", 1.0, lambda: 2) == 2
    assert Saved(path).steps == {"one": [0.5], "two": 2}


def test_a_step_that_fails_is_run_again(tmp_path: Path) -> None:
    def fails() -> int:
        raise RuntimeError("lost")

    path = tmp_path / "steps.json"
    with pytest.raises(RuntimeError, match="lost"):
        Saved(path).step("one", 1.0, fails)
    assert Saved(path).step("one", 1.0, lambda: 1) == 1


def test_no_step_begins_that_would_not_end_in_time(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "steps.json", seconds=60.0)
    assert saved.step("short", 1.0, lambda: 1) == 1
    with pytest.raises(OutOfTimeError, match="long"):
        saved.step("long", 600.0, lambda: 2)
    assert saved.step("short", 600.0, lambda: 3) == 1  # it costs nothing
