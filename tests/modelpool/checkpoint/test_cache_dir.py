"""The cache is where its variables say, ours before the desktop's."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from modelpool.checkpoint.cache_dir import cache_dir, make_folder, remove


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


def test_a_folder_takes_the_place_of_a_file(tmp_path: Path) -> None:
    for name in ("file", "link"):
        path = tmp_path / name
        path.write_text("") if name == "file" else path.symlink_to("nowhere")
        make_folder(path)
        make_folder(path)
        assert list(path.iterdir()) == []


def test_many_may_make_a_folder_at_once(tmp_path: Path) -> None:
    def put(number: int) -> None:
        folder = tmp_path / str(number // 8)
        make_folder(folder)
        (folder / str(number)).touch()

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(put, range(1600)))
    assert len(list(tmp_path.glob("*/*"))) == 1600


def test_what_is_removed_may_be_anything_but_not_what_it_points_to(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "inside").mkdir(parents=True)
    folder, link = tmp_path / "folder", tmp_path / "link"
    (folder / "inside").mkdir(parents=True)
    link.symlink_to(kept)
    for path in (folder, link, tmp_path / "nothing"):
        remove(path)
    assert list(tmp_path.iterdir()) == [kept]
    assert (kept / "inside").is_dir()
