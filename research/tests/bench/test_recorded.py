"""Recorded outputs: those of files, and the built-in agent workload."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from modelpool.errors import ConfigError
from research.bench.recorded import (
    Trajectories,
    Trajectory,
    agent_workload,
    fingerprint,
    functions,
    guarded,
    load_trajectories,
    renamed,
    tokenize_trajectories,
)
from tests.specrouter.bench.test_prompts import Letters

SOURCE = '''\
import os

def first(path, copies=1):
    """Says the first.

    Of path.
    """
    return os.path.join(path, copies)


def without_text(path):
    return path


@os.wraps
def wrapped(path):
    """Wrapped."""
    return path
'''


@pytest.fixture(scope="module")
def built_in() -> Trajectories:
    return agent_workload()


def kept(trajectory: Trajectory) -> float:
    """The share of the output's lines that stand in the prompt as they are."""
    lines, known = trajectory.output.splitlines(), set(trajectory.prompt.splitlines())
    return sum(line in known for line in lines) / len(lines)


def test_the_workload_has_four_parts_of_a_dozen_or_more(built_in: Trajectories) -> None:
    assert list(built_in) == ["edits", "echoes", "json", "turns"]
    assert all(len(found) >= 12 for found in built_in.values())


def test_the_workload_is_the_same_each_time(built_in: Trajectories) -> None:
    assert fingerprint(built_in) == fingerprint(agent_workload())
    other = {**built_in, "json": built_in["json"][1:]}
    assert fingerprint(other)["sha256"] != fingerprint(built_in)["sha256"]


@pytest.mark.parametrize("part", ["edits", "turns"])
def test_what_is_edited_is_python_that_repeats_most_of_its_prompt(
    built_in: Trajectories, part: str
) -> None:
    for one in built_in[part]:
        ast.parse(one.output)
        assert one.output.strip() not in one.prompt
    assert sum(map(kept, built_in[part])) / len(built_in[part]) > 0.6


def test_an_echo_quotes_the_result_and_json_is_json(built_in: Trajectories) -> None:
    for one in built_in["echoes"]:
        assert kept(one) > 0.6  # the calls below the quotations are new lines of known words
    for one in built_in["json"]:
        assert json.loads(one.output)


def test_functions_are_those_with_a_docstring_and_a_body() -> None:
    [found] = functions(SOURCE)
    assert (found.name, found.parameters, found.line) == ("first", ("path", "copies"), 3)
    assert found.summary == "Says the first."
    changed = guarded(found, found.source, "path").split("\n")
    assert changed[5:7] == [
        "    if path is None:",
        '        raise TypeError("path must not be None")',
    ]


def test_a_name_is_changed_where_it_is_no_attribute_and_no_part_of_a_name() -> None:
    assert renamed("path, os.path, pathway, _path", "path", "way") == "way, os.path, pathway, _path"


def test_a_library_without_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr("inspect.getsource", fails)
    complaint = "^--workload: agent needs the source of Python's module"
    with pytest.raises(ConfigError, match=complaint):
        agent_workload()


def test_files_have_a_prompt_and_an_output_in_every_line(tmp_path: Path) -> None:
    file = tmp_path / "tools.jsonl"
    file.write_text('{"prompt": "a", "output": "b", "id": 1}\n\n{"prompt": "c", "output": "d"}\n')
    assert load_trajectories([file]) == {"tools": [Trajectory("a", "b"), Trajectory("c", "d")]}
    for bad in ('{"prompt": "a"}', '{"prompt": "a", "output": ""}', '["a"]'):
        file.write_text(bad)
        with pytest.raises(ConfigError, match=r"^--prompts: line 1 of .* no prompt and output"):
            load_trajectories([file])


def test_outputs_are_cut_and_what_does_not_fit_whole_is_left_out() -> None:
    found = {"x": [Trajectory("abc", "defg"), Trajectory("abcdefgh", "ij")]}
    [prompt] = tokenize_trajectories(found, Letters(), 6, 3)["x"]
    assert (prompt.text, prompt.token_ids) == ("abc", (97, 98, 99))
    assert prompt.recorded == (100, 101, 102)
    with pytest.raises(ConfigError, match=r"^--workload: no recorded text of 'x' fits 5 tokens"):
        tokenize_trajectories(found, Letters(), 5, 3)
