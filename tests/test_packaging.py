"""What is installed is complete: every package, the bundled weights, the scenarios."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("specrouter", "processors", "statemgr", "modelpool")


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in a wheel of this tree. Built in a copy: builds leave folders."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "configs", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(built), "."]
    ran = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    (file,) = built.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        return set(archive.namelist())


def files(folder: str, pattern: str) -> set[str]:
    """As they are in the tree, caches left out."""
    found = (ROOT / folder).rglob(pattern)
    return {
        str(file.relative_to(ROOT))
        for file in found
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_modules_types_models_scenarios_and_pages_are_installed(wheel: set[str]) -> None:
    for package in PACKAGES:
        assert files(package, "*.py") | {f"{package}/py.typed"} <= wheel
    bundled = files("modelpool/bundled", "*")
    assert len([name for name in bundled if name.endswith(".safetensors")]) == 5
    scenarios = {f"specrouter/{name}" for name in files("configs", "*.yaml")}
    pages = files("specrouter/http/page", "*") | files("specrouter/http", "*.html")
    assert "specrouter/http/page/vendor/NOTICE" in pages
    assert bundled | scenarios | pages <= wheel


def test_nothing_else_is_installed(wheel: set[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_every_tested_version_is_within_its_range() -> None:
    """A constraint outside of pyproject's range would make `make` fail to install."""
    from packaging.requirements import Requirement

    pinned = [
        Requirement(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    versions = {one.name.lower().replace("_", "-"): str(one.specifier)[2:] for one in pinned}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        assert requirement.specifier.contains(versions[requirement.name.lower()]), requirement
