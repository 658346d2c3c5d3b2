"""The built-in agent workload: code edits, tool-call echoes, JSON and turns, as recorded outputs.

Made of functions of Python's standard library, which every machine with Python has: the same on
each machine with the same Python. What an assistant would answer is written down by rule, so that
it has the form of such answers: an edit repeats all of a function but for one change, an echo
quotes some of a tool's results and calls the next tools with them, JSON has the same keys in every
object, and a turn changes once more what earlier turns have changed.

Contract: pure but for reading the library's sources. Not here: how they are replayed
(`specrouter.request.recorded_text`).
"""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelpool.errors import ConfigError
from specrouter.bench.trajectories import Trajectories, Trajectory

_MODULES = ("textwrap", "statistics", "colorsys", "heapq", "shutil", "base64", "fnmatch", "glob")
_EDITED = range(300, 650)  # characters of a function: three versions of it fit 1,024 tokens
_LISTED = 6  # functions of a tool's result


@dataclass(frozen=True)
class Function:
    """A function of the library, at a line of its module's file."""

    name: str
    parameters: tuple[str, ...]
    signature: str  # its `def` line
    summary: str  # the first line of its docstring
    line: int
    body_line: int  # of its first statement behind the docstring, counted from its own first
    source: str


def agent_workload() -> Trajectories:
    """By part: edits, echoes, json, turns. Raises `ConfigError` without the library's sources."""
    modules = {name: functions(_source(name)) for name in _MODULES}
    edited = [
        one
        for found in modules.values()
        for one in found
        if len(one.source) in _EDITED and one.parameters
    ]
    return {
        "edits": [_edit(one, number) for number, one in enumerate(edited)],
        "echoes": [_echo(name, part) for name, found in modules.items() for part in _parts(found)],
        "json": [_extraction(part) for found in modules.values() for part in _parts(found)],
        "turns": [_last_turn(one) for one in edited],
    }


def functions(source: str) -> list[Function]:
    """Those of a module that stand at its top level and have a docstring and a body."""
    found = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or len(node.body) < 2:
            continue
        text, doc = ast.get_source_segment(source, node), ast.get_docstring(node)
        if text is None or not doc:
            continue
        found.append(
            Function(
                node.name,
                tuple(one.arg for one in node.args.args),
                text.split("\n", 1)[0],
                doc.split("\n", 1)[0],
                node.lineno,
                node.body[1].lineno - node.lineno,
                text,
            )
        )
    return found


def renamed(source: str, old: str, new: str) -> str:
    """Attributes of that name are not the function's own."""
    return re.sub(rf"(?<![.\w]){re.escape(old)}\b", new, source)


def guarded(function: Function, source: str, parameter: str) -> str:
    """`source`, a version of the function, with a check in front of its body."""
    lines = source.split("\n")
    check = [
        f"    if {parameter} is None:",
        f'        raise TypeError("{parameter} must not be None")',
    ]
    return "\n".join([*lines[: function.body_line], *check, *lines[function.body_line :]])


def _edit(function: Function, number: int) -> Trajectory:
    """Every other one renames a parameter throughout, the others insert two lines."""
    parameter = function.parameters[0]
    if number % 2:
        asked = f"Check that {parameter} is not None."
        answer = guarded(function, function.source, parameter)
    else:
        asked = f"Rename {parameter} to {parameter}_given."
        answer = renamed(function.source, parameter, f"{parameter}_given")
    return Trajectory(f"{function.source}\n\n# {asked} Write the whole function.\n", f"{answer}\n")


def _last_turn(function: Function) -> Trajectory:
    """The third change; the two before it, and what came of them, are in the prompt."""
    parameter = function.parameters[0]
    name = f"{parameter}_given"
    first = renamed(function.source, parameter, name)
    second = guarded(function, first, name)
    third = renamed(second, function.name, f"checked_{function.name}")
    prompt = (
        f"{function.source}\n\n# Rename {parameter} to {name}.\n{first}\n\n"
        f"# Check that {name} is not None.\n{second}\n\n"
        f"# Call it checked_{function.name}.\n"
    )
    return Trajectory(prompt, f"{third}\n")


def _echo(module: str, found: Sequence[Function]) -> Trajectory:
    """A tool's result, and an answer that quotes every other entry and reads those places."""
    entries = [{"path": f"{module}.py", "line": one.line, "text": one.signature} for one in found]
    result = json.dumps(entries, indent=1)
    quoted = json.dumps(entries[::2], indent=1)
    calls = [
        json.dumps({"tool": "read", "path": entry["path"], "line": entry["line"]})
        for entry in entries[::2]
    ]
    prompt = f'Call: {{"tool": "search", "text": "def", "path": "{module}.py"}}\nResult: {result}\n'
    return Trajectory(prompt, "These match:\n" + "\n".join([quoted, *calls]) + "\n")


def _extraction(found: Sequence[Function]) -> Trajectory:
    listed = "\n".join(f"{one.line}: {one.signature} {one.summary}" for one in found)
    objects = [
        {"name": one.name, "parameters": one.parameters, "line": one.line, "summary": one.summary}
        for one in found
    ]
    return Trajectory(
        f"{listed}\n\nAs JSON, with name, parameters, line and summary:\n",
        json.dumps(objects, indent=1) + "\n",
    )


def _parts(found: Sequence[Function]) -> Iterator[Sequence[Function]]:
    """Lists of the same length; what is left over is not used."""
    for start in range(0, len(found) - _LISTED + 1, _LISTED):
        yield found[start : start + _LISTED]


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    try:
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"no file of {module}")
        return Path(spec.origin).read_text(encoding="utf-8")
    except OSError as error:
        reason = f"agent needs the source of Python's module {module}: {error}"
        raise ConfigError("--workload", reason) from error
