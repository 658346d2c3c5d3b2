"""The house's rules: which package may import which, and what stands at the top level."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "specrouter": {"specrouter", "processors", "statemgr", "modelpool"},
    "processors": {"processors", "statemgr", "modelpool"},
    "statemgr": {"statemgr"},
    "modelpool": {"modelpool"},
}
OURS = {*MAY_IMPORT, "examples", "tests", "configs", "docs"}
WEB = {"fastapi", "starlette", "uvicorn"}
TOP_LEVEL = {
    ".ci", ".dockerignore", ".gitignore", "LICENSE", "Makefile", "README.md", "configs",
    "constraints.txt", "docs", "examples", "modelpool", "processors", "pyproject.toml",
    "specrouter", "statemgr", "tests",
}  # fmt: skip


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or ""


def top(module: str) -> str:
    return module.partition(".")[0]


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"{package}/ has no source"
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_in_one_direction(package: str) -> None:
    allowed = MAY_IMPORT[package]
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(package)
        for module in imports(path)
        if top(module) in OURS - allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["processors", "statemgr", "modelpool"])
def test_only_specrouter_knows_http(package: str) -> None:
    assert not [path for path in sources(package) if WEB & set(map(top, imports(path)))]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_every_package_declares_its_types(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_core_imports_without_optional_or_web_dependencies() -> None:
    absent = ["flashinfer", "ray", *sorted(WEB)]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "import specrouter, specrouter.cli, processors, statemgr, modelpool"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_top_level_holds_only_the_agreed_names() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {line.partition("/")[0] for line in listed.stdout.splitlines()} <= TOP_LEVEL
