"""No room grows unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.measures.rooms import DOCUMENTS_KB, PRODUCT, ROOMS, Room, kilobytes, lines

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [*ROOMS, "product"])
def test_a_room_is_no_larger_than_was_agreed(name: str) -> None:
    room = ROOMS.get(name, PRODUCT)
    assert lines(ROOT, room) <= room.most


def test_documents_are_no_longer_than_was_agreed() -> None:
    assert kilobytes(ROOT, DOCUMENTS_KB) <= DOCUMENTS_KB.most


def test_lines_are_those_of_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "room" / "inner").mkdir(parents=True)
    (tmp_path / "room" / "a.py").write_text("x = 1\n\n")
    (tmp_path / "room" / "inner" / "b.py").write_text("y = 2\n")
    (tmp_path / "room" / "page.md").write_text("k" * 2000)
    (tmp_path / "alone.py").write_text("z = 3\n")
    room = Room(folders=("room", "alone.py"), before=0, aim=0, most=0)
    assert lines(tmp_path, room) == 4
    assert kilobytes(tmp_path, Room(folders=("room",), before=0, aim=0, most=0)) == 2
