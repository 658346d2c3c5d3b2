"""The house's rules: which package may import which, and what stands at the top level."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "specrouter": {"specrouter", "processors", "statemgr", "modelpool"},
    "processors": {"processors", "statemgr", "modelpool"},
    "statemgr": {"statemgr"},
    "modelpool": {"modelpool"},
}
# The rooms of `specrouter/`, top to bottom: a room imports itself and rooms below it. Those of one
# line do not see each other. A file at the top of the package is a room of its own.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("http", "bench"),
    ("__init__",),
    ("router",),
    ("cluster",),
    ("engine",),
    ("routing",),
    ("slo", "execution"),
    ("view",),
    ("profile",),
    ("cycle",),
    ("config",),
    ("request",),
    ("logs", "scenarios", "version"),
)
# Beside these only benchmarks and the command line know tensors.
KNOW_TORCH = {
    "execution",
    "bench",
    "engine/start_failure.py",
    "engine/worker_threads.py",
}
OURS = {*MAY_IMPORT, "examples", "research", "tests", "checks", "conftest", "configs", "docs"}
WEB = {"fastapi", "starlette", "uvicorn"}
TOP_LEVEL = {
    ".ci", ".dockerignore", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile",
    "LICENSE", "Makefile", "README.md", "checks", "conftest.py",
    "configs", "constraints.txt", "docs", "examples", "modelpool", "processors", "pyproject.toml",
    "research", "specrouter", "statemgr", "tests",
}  # fmt: skip


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, wherever in the file."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
    return frozenset(found)


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


def test_the_laboratory_imports_the_product_and_no_test() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources("research")
        for module in imports(path)
        if top(module) in {"tests", "checks", "examples"}
    ]
    assert wrong == []


def room_of(module: str) -> str:
    """Of `specrouter` itself, its public names: "__init__"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def own_room(path: Path) -> str:
    parts = path.relative_to(ROOT / "specrouter").with_suffix("").parts
    return parts[0]


def floors() -> dict[str, int]:
    return {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}


def test_every_room_is_in_the_table() -> None:
    assert {own_room(path) for path in sources("specrouter")} == set(floors())


def test_rooms_import_only_rooms_below_them() -> None:
    floor = floors()
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources("specrouter")
        for module in imports(path)
        if top(module) == "specrouter"
        and room_of(module) != own_room(path)
        and floor[room_of(module)] <= floor[own_room(path)]
    ]
    assert wrong == []


def test_files_of_a_room_do_not_import_in_circles() -> None:
    """Within rooms, and within the other packages."""
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): set(imports(path))
        for package in MAY_IMPORT
        for path in sources(package)
    }
    graph = {name: found & set(graph) for name, found in graph.items()}
    while free := {name for name, found in graph.items() if not found & set(graph)}:
        graph = {name: found for name, found in graph.items() if name not in free}
    assert graph == {}


def test_only_execution_and_the_profile_at_load_know_tensors() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources("specrouter")
        if "torch" in set(map(top, imports(path)))
        and not {own_room(path), str(path.relative_to(ROOT / "specrouter"))} & KNOW_TORCH
    ]
    assert wrong == []


def test_only_the_cluster_knows_ray() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for package in MAY_IMPORT
        for path in sources(package)
        if "ray" in set(map(top, imports(path))) and "cluster" not in path.parts
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
        "import specrouter, specrouter.cli.main, processors, statemgr, modelpool"
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
