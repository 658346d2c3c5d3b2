"""How `make` sets up `.venv`, with a Python that only notes what it is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INDEX = "https://index.example/cpu"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

# `-c` is answered by the real one; `-m venv` puts itself there; of pip its environment is kept.
FAKE = f"""#!/bin/sh
case "$1 $2" in
-c*) exec {sys.executable} "$@" ;;
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") [ "$3" != install ] || echo "$PIP_EXTRA_INDEX_URL $*" >installed ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What `make install` reads, and a Python called `fake`."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    fake = tmp_path / "fake"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    return tmp_path


def ask_for(version: str, tree: Path) -> None:
    project = tree / "pyproject.toml"
    text = project.read_text()
    assert 'requires-python = ">=3.' in text
    project.write_text(text.replace('requires-python = ">=3.', f'requires-python = ">={version}'))


def make(tree: Path, *arguments: str, target: str = "install") -> subprocess.CompletedProcess[str]:
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHON3")  # of a `make test` that runs this
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", target, *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def test_the_python_that_is_named_makes_the_environment_and_pip_sees_the_index(tree: Path) -> None:
    done = make(tree, "PYTHON3=./fake", f"PIP_EXTRA_INDEX_URL={INDEX}")
    assert done.returncode == 0, done.stderr
    assert (tree / "installed").read_text().startswith(f"{INDEX} -m pip install ")
    (tree / "installed").unlink()
    assert make(tree).returncode == 0
    assert not (tree / "installed").exists()  # once is enough


def test_an_old_python_makes_no_environment_and_the_line_says_what_to_do(tree: Path) -> None:
    ask_for("9.", tree)
    done = make(tree, "PYTHON3=./fake")
    assert done.returncode != 0
    complaint, own = done.stderr.splitlines()
    assert complaint.startswith("./fake is Python 3.")
    assert "below 9." in complaint
    assert complaint.endswith("rm -rf .venv; make serve PYTHON3=python3.12")
    assert own.startswith("make: ***")
    assert not (tree / ".venv").exists()


def test_an_environment_of_an_old_python_is_refused_although_the_named_one_is_new(
    tree: Path,
) -> None:
    ask_for("9.", tree)
    (tree / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(tree / "fake", tree / ".venv" / "bin" / "python")
    done = make(tree, "PYTHON3=true")
    assert done.returncode != 0
    assert done.stderr.startswith(".venv/bin/python is Python 3.")
    assert not (tree / "installed").exists()
