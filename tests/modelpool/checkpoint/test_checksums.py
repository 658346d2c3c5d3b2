"""Checksums find every kind of damage, and nothing where there is none."""

from pathlib import Path

import pytest

from modelpool.checkpoint.cached_folder import CHECKSUMS, damage, write_checksums
from test_support.cache_damage import OF_FILE, OF_NUMBERS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    (made / "weights").write_bytes(bytes(range(256)) * 100)
    (made / "config.json").write_text('{"a": 1}')
    write_checksums(made)
    return made


def test_what_is_as_it_was_is_not_damaged(folder: Path) -> None:
    assert damage(folder) is None
    (folder / ".nfs0001").write_text("of the file system")
    assert damage(folder) is None


@pytest.mark.parametrize("file", ["weights", "config.json", CHECKSUMS])
@pytest.mark.parametrize("name", OF_FILE)
def test_a_damaged_file_is_found(name: str, file: str, folder: Path) -> None:
    OF_FILE[name](folder / file)
    reason = damage(folder)
    assert reason is not None
    assert "\n" not in reason


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_other_checksums_are_found(name: str, folder: Path) -> None:
    OF_NUMBERS[name](folder / CHECKSUMS)
    assert damage(folder) is not None
