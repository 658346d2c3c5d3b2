"""Recorded outputs, which are replayed: prompts with what was answered to them.

Contract: a part is a file, or one of the built-in agent workload's. A recorded output is what
every contender says, up to a number of tokens.

The built-in workload has code edits, tool-call echoes, JSON and turns, made of functions of
Python's standard library: the same on each machine with the same Python. Answers are written by
rule, so that they have the form of an assistant's. An edit repeats all of a function but for one
change, an echo quotes some of a tool's results and calls the next tools with them, JSON has the
same keys in every object, and a turn changes once more what earlier turns have changed.

A `RecordedContender` has the router replay them (`recorded_text`).
"""

import ast
import hashlib
import importlib
import inspect
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelpool.errors import ConfigError
from research.bench.recorded_text import RecordedText
from specrouter.bench.contenders import OwnContender
from specrouter.bench.prompts import BenchPrompt, Tokenizer, Work, read_entries
from specrouter.request.params import SamplingParams

_MODULES = ("textwrap", "statistics", "colorsys", "heapq", "shutil", "base64", "fnmatch", "glob")
_EDITED = range(300, 650)  # characters of a function: three versions of it fit 1,024 tokens
_LISTED = 6  # functions of a tool's result


@dataclass(frozen=True)
class Trajectory:
    """A prompt, and what was answered to it."""

    prompt: str
    output: str


@dataclass(frozen=True)
class RecordedPrompt(BenchPrompt):
    """`recorded`: what is to be said."""

    recorded: tuple[int, ...] = ()


class RecordedContender(OwnContender):
    """What is recorded of a prompt is what every contender says."""

    def params(self, work: Work, prompt: BenchPrompt, *run: Any) -> SamplingParams:
        usual = super().params(work, prompt, *run)
        if not isinstance(prompt, RecordedPrompt):
            return usual
        said = prompt.recorded[: work.new_tokens]
        form = RecordedText(said, self.router.pool.vocab_size)
        return replace(usual, max_new_tokens=len(said), structure=form)


Trajectories = Mapping[str, Sequence[Trajectory]]  # by part


def load_trajectories(files: Sequence[Path]) -> Trajectories:
    """Of JSON lines with `prompt` and `output`. Raises `ConfigError` for what has none."""
    found: dict[str, list[Trajectory]] = {}
    for file in files:
        of_file = [_trajectory(where, entry) for where, entry in read_entries(file)]
        found.setdefault(file.stem, []).extend(of_file)
    return found


def tokenize_trajectories(
    trajectories: Trajectories, tokenizer: Tokenizer, limit: int, new_tokens: int
) -> dict[str, list[RecordedPrompt]]:
    """By part; outputs are cut to `new_tokens`. What is longer than `limit` with its output is
    left out: a prompt cut from the left would no longer hold what is quoted.

    Raises `ConfigError` for a part of which nothing is left.
    """
    prompts: dict[str, list[RecordedPrompt]] = {}
    for part, found in trajectories.items():
        whole = [_prompt(part, one, tokenizer, new_tokens) for one in found]
        prompts[part] = [p for p in whole if len(p.token_ids) + len(p.recorded) <= limit]
        if not prompts[part]:
            reason = f"no recorded text of {part!r} fits {limit} tokens with its prompt"
            raise ConfigError("--workload", reason)
    return prompts


def fingerprint(trajectories: Trajectories) -> dict[str, Any]:
    """What figures of recorded texts are comparable by."""
    digest = hashlib.sha256()
    for part, found in trajectories.items():
        for one in found:
            digest.update("\0".join((part, one.prompt, one.output, "")).encode())
    return {
        "sha256": digest.hexdigest()[:16],
        "python": platform.python_version(),
        "is_recorded": True,
    }


def _prompt(part: str, one: Trajectory, tokenizer: Tokenizer, new_tokens: int) -> RecordedPrompt:
    prompt, output = (tuple(tokenizer(text)["input_ids"]) for text in (one.prompt, one.output))
    return RecordedPrompt(part, one.prompt, prompt, output[:new_tokens])


def _trajectory(where: str, entry: Any) -> Trajectory:
    texts = [entry.get(name) if isinstance(entry, dict) else None for name in ("prompt", "output")]
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(
            "--prompts", f"{where} has no prompt and output, as --workload agent needs"
        )
    return Trajectory(*map(str, texts))


@dataclass(frozen=True, kw_only=True)
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
                name=node.name,
                parameters=tuple(one.arg for one in node.args.args),
                signature=text.split("\n", 1)[0],
                summary=doc.split("\n", 1)[0],
                line=node.lineno,
                body_line=node.body[1].lineno - node.lineno,
                source=text,
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
    try:
        return inspect.getsource(importlib.import_module(module))
    except OSError as error:
        reason = f"agent needs the source of Python's module {module}: {error}"
        raise ConfigError("--workload", reason) from error
