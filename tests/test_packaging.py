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


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_installed(package: str, wheel: set[str]) -> None:
    assert files(package, "*.py") <= wheel


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_installed(package: str, wheel: set[str]) -> None:
    assert f"{package}/py.typed" in wheel


def test_the_bundled_models_are_installed_whole(wheel: set[str]) -> None:
    bundled = files("modelpool/bundled", "*")
    assert len([name for name in bundled if name.endswith(".safetensors")]) == 5
    assert bundled <= wheel


def test_scenarios_are_installed_where_the_command_line_looks(wheel: set[str]) -> None:
    scenarios = {str(Path(name).relative_to("configs")) for name in files("configs", "*.yaml")}
    assert {f"specrouter/configs/{name}" for name in scenarios} <= wheel


def test_the_pages_are_installed(wheel: set[str]) -> None:
    page = files("specrouter/http/page", "*")
    assert "specrouter/http/page/vendor/NOTICE" in page
    assert files("specrouter/http", "*.html") | page <= wheel


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
