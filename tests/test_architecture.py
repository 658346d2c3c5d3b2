"""The house's rules: which package may import which, and what stands at the top level."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from modelpool.attention.backend import BACKENDS
from specrouter.registry import Registry

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "specrouter": {"specrouter", "processors", "statemgr", "modelpool"},
    "processors": {"processors", "statemgr", "modelpool"},
    "statemgr": {"statemgr", "modelpool"},
    "modelpool": {"modelpool"},
}
# The rooms of `specrouter/`, top to bottom: a room imports itself and rooms below it. Those of one
# line do not see each other. A file at the top of the package is a room of its own.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("http", "bench"),
    ("__init__",),
    ("llm",),
    ("router",),
    ("cluster",),
    ("engine",),
    ("routing",),
    ("slo", "execution"),
    ("view",),
    ("profile",),
    ("cycle",),
    ("target",),
    ("http_client",),
    ("config",),
    ("notebook",),
    ("request",),
    ("logs", "progress", "registry", "scenarios", "version"),
)
# Beside these only benchmarks and the command line know tensors.
KNOW_TORCH = {
    "execution",
    "bench",
    "engine/engine_thread.py",
}
# Policies by names that mean nothing else. What depends on a policy asks for its attributes.
POLICY_NAMES = {
    "adaptive", "static", "smallest", "target-only", "goodput", "global-greedy", "fcfs",
    "flowguard", "join-shortest", "p2c", "round-robin",
}  # fmt: skip
KNOW_POLICY_NAMES = {
    "config/policies.py",
    "config/old_spellings.py",
    "bench/chains.py",  # contenders, which are called as the policies are
}
NO_ARGUMENT = ("ClassVar", "init=False")  # in a field of a dataclass
OURS = {
    *MAY_IMPORT, "examples", "research", "test_support", "tests", "checks", "conftest", "configs",
    "docs",
}  # fmt: skip
WEB = {"fastapi", "starlette", "uvicorn"}
TOP_LEVEL = {
    ".ci", ".dockerignore", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile",
    "LICENSE", "Makefile", "README.md", "SECURITY.md", "checks", "conftest.py",
    "configs", "constraints.txt", "deploy", "docs", "examples", "modelpool", "processors",
    "pyproject.toml", "research", "setup.py", "specrouter", "statemgr", "test_support", "tests",
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


def wrong_imports(package: str, forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(package)
        for module in imports(path)
        if top(module) in forbidden
    ]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_in_one_direction_and_only_specrouter_knows_http_and_ray(
    package: str,
) -> None:
    elsewhere = {"ray", *WEB} if package != "specrouter" else set()
    assert wrong_imports(package, OURS - MAY_IMPORT[package] | elsewhere) == []


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("research", {"tests", "checks", "test_support", "examples"}),
        ("test_support", {"tests", "checks", "examples", "research"}),
        ("tests", {"checks"}),
        ("checks", {"tests"}),
    ],
)
def test_neither_the_laboratory_nor_tests_nor_checks_import_each_other(
    package: str, forbidden: set[str]
) -> None:
    """But for the laboratory's own tests."""
    wrong = wrong_imports(package, forbidden)
    assert [one for one in wrong if not one.startswith("research/tests/")] == []


def room_of(module: str) -> str:
    """Of `specrouter` itself, its public names: "__init__"."""
    return (*module.split("."), "__init__")[1]


def own_room(path: Path) -> str:
    return path.relative_to(ROOT / "specrouter").with_suffix("").parts[0]


def test_rooms_import_only_rooms_below_them() -> None:
    floor = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
    assert {own_room(path) for path in sources("specrouter")} == set(floor)
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


def test_dataclasses_of_many_fields_take_keywords_only() -> None:
    """Their arguments could be exchanged by mistake."""
    for path in (
        path for package in (*MAY_IMPORT, "research", "checks") for path in sources(package)
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            made = [ast.unparse(each) for each in node.decorator_list]
            told = [each for each in made if each.startswith("dataclass")]
            given = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            fields = sum(not any(no in ast.unparse(one) for no in NO_ARGUMENT) for one in given)
            assert not told or fields <= 5 or "kw_only" in told[0], f"{path}: {node.name}"


def comparisons(path: Path) -> Iterator[tuple[str, int, set[str]]]:
    """Where something is compared with strings, or a type allows them: text, line and strings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_literal = isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal")
        if is_literal or isinstance(node, ast.Compare | ast.MatchValue):
            assert isinstance(node, ast.expr | ast.pattern)
            inner = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            yield ast.unparse(node), node.lineno, {one for one in inner if isinstance(one, str)}


def compared_strings(path: Path) -> dict[str, int]:
    """Strings that something is compared with, or that a type allows, each with its line."""
    return {one: line for _, line, strings in comparisons(path) for one in strings}


def test_policies_are_told_apart_by_their_attributes_and_not_by_name() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} knows {name}"
        for path in sources("specrouter")
        if str(path.relative_to(ROOT / "specrouter")) not in KNOW_POLICY_NAMES
        for name, line in compared_strings(path).items()
        if name in POLICY_NAMES
    ]
    assert wrong == []


def test_attention_backends_are_told_apart_by_what_they_can_do_and_not_by_name() -> None:
    """`path` alone is an ordinary word, too: it is looked for beside what a backend is called."""
    found = {
        f"{path.relative_to(ROOT)}:{line}": (text, compared)
        for package in (*MAY_IMPORT, "research", "checks")
        for path in sources(package)
        if not path.is_relative_to(ROOT / "modelpool/attention")
        for text, line, compared in comparisons(path)
    }
    about = ("attention", "backend")
    wrong = [
        where
        for where, (text, compared) in found.items()
        if compared & (BACKENDS.keys() - {"path"})
        or ("path" in compared and any(word in text for word in about))
    ]
    assert wrong == []


def test_the_names_of_policies_are_those_that_are_registered() -> None:
    from specrouter.config import policies

    registries = [one for one in vars(policies).values() if isinstance(one, Registry)]
    assert len(registries) == 4
    assert set().union(*(one.names for one in registries)) >= POLICY_NAMES


def test_core_imports_without_optional_or_web_dependencies() -> None:
    absent = ["flashinfer", "ray", *sorted(WEB)]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "import specrouter, specrouter.cli.main, processors, statemgr, modelpool"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_top_level_holds_only_the_agreed_names() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    assert {line.partition("/")[0] for line in listed.splitlines()} <= TOP_LEVEL


def test_every_package_is_in_the_wheel() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        installed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    for top in MAY_IMPORT:
        for package in (ROOT / top).rglob("__init__.py"):
            assert ".".join(package.parent.relative_to(ROOT).parts) in installed
