"""Rooms and floors, long files and functions, files without a test: read from the sources alone."""

import ast
from functools import cache
from pathlib import Path

from checks.measures.covered import COVERED
from checks.measures.decision_code import lines_of_code
from checks.measures.sources import Function, Sources

LONG_FILE, LONG_FUNCTION, MANY_PARAMETERS = 300, 40, 6
# What stands beside the rooms of the decoding service itself.
BESIDE = {"http", "bench", "cluster", "cli"}
# Files with so many lines of code or more have a test file of their own.
WORTH_A_TEST = 40


def rooms(sources: Sources) -> list[str]:
    """Files and folders of `specrouter/` itself, but for `__init__` and those in `BESIDE`."""
    found = {_room(source.module) for source in sources.files}
    own = {room.partition("/")[2] for room in found if room.startswith("specrouter/")}
    return sorted(own - BESIDE - {"__init__", "__main__"})


def floors(sources: Sources) -> tuple[str, ...]:
    """The longest chain of rooms, each of which imports the next.

    A room is a file or a folder of `specrouter/`, or another package as a whole. An import counts
    wherever it stands in a file.
    """
    graph: dict[str, set[str]] = {}
    for module, imported in sources.imports().items():
        rooms_below = graph.setdefault(_room(module), set())
        rooms_below |= {_room(name) for name in imported} - {_room(module)}
    waiting = set[str]()

    @cache
    def longest(room: str) -> tuple[str, ...]:
        waiting.add(room)
        below = [longest(other) for other in sorted(graph[room]) if other not in waiting]
        waiting.remove(room)
        return (room, *max(below, key=len, default=()))

    return max((longest(room) for room in sorted(graph)), key=len)


def _room(module: str) -> str:
    package, _, rest = module.partition(".")
    if package != "specrouter":
        return package
    return f"specrouter/{rest.partition('.')[0] or '__init__'}"


def long_files(sources: Sources) -> list[str]:
    return [f"{one.path} ({one.lines})" for one in sources.files if one.lines > LONG_FILE]


def long_functions(sources: Sources) -> list[str]:
    """By all their lines, the docstring included and decorators not."""
    return [
        f"{one.path}:{function.name} ({_lines(function)})"
        for one in sources.files
        for function in one.functions()
        if _lines(function) > LONG_FUNCTION
    ]


def _lines(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def wide_functions(sources: Sources) -> list[str]:
    """Of more parameters than they should have; `self` and `cls` are none.

    Kernels do not count: pointers, strides and constants come one by one.
    """
    return [
        f"{one.path}:{function.name} ({len(parameters(function))})"
        for one in sources.files
        for function in one.functions()
        if len(parameters(function)) > MANY_PARAMETERS and not _is_kernel(function)
    ]


def _is_kernel(function: Function) -> bool:
    return any(ast.unparse(one) == "triton.jit" for one in function.decorator_list)


def parameters(function: Function) -> list[str]:
    given = function.args
    named = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [one.arg for one in named if one is not None and one.arg not in ("self", "cls")]


def step_statements(sources: Sources) -> int:
    """Of `Engine.step`, and of `_step` where it hands everything on: docstrings are none."""
    count = 0
    for source in sources.files:
        if source.path.name != "engine.py":
            continue
        for function in source.functions():
            if function.name in ("step", "_step"):
                count += sum(map(_is_statement, ast.walk(function))) - 1
    return count


def _is_statement(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not is_text


def untested_files(sources: Sources) -> list[str]:
    """Those with code, but no `test_NAME.py` at their place in `tests/` and none in `COVERED`."""
    return [
        source.path.as_posix()
        for source in sources.files
        if source.path.name != "__init__.py"  # names of other files
        and not (sources.root / "tests" / _test_of(source.path)).is_file()
        and len(lines_of_code(source.text)) >= WORTH_A_TEST
    ]


def _test_of(path: Path) -> Path:
    own = path.with_name(f"test_{path.name}")
    return Path(COVERED.get(path.as_posix(), own))
