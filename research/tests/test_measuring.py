"""The measuring programs run, on the bundled family."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from modelpool.fast.cpu import int8_refusal
from research.studies import (
    calibration,
    ceiling,
    choice_speed,
    drafter_speed,
    token_profile,
    weights_quality,
    weights_speed,
)
from specrouter.profile.calibration import Calibration
from specrouter.scenarios import scenario_folder

pytestmark = pytest.mark.long

needs_int8 = pytest.mark.skipif(int8_refusal() is not None, reason=str(int8_refusal()))


def test_the_speed_of_the_choice_is_told_by_kind_of_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choice_speed.main(["--vocab", "33000", "--rows", "1", "2", "--rounds", "1"])
    header, *lines, last = capsys.readouterr().out.splitlines()
    assert [line.count("|") for line in (header, *lines)] == [7, 7, 7]
    speeds = json.loads(last)["tokens_per_s"]
    assert [*speeds] == ["1", "2"]
    assert all(speed > 0 for kinds in speeds.values() for speed in kinds.values())


@needs_int8
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quality_of_weights_is_told_on_own_texts(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "some.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 40, encoding="utf-8")
    asked = ["--weights", weights, "--texts", str(text)]
    weights_quality.main([*asked, "--windows", "3", "--length", "40"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tokens"] == 3 * 39
    assert found["loss_ratio"] == pytest.approx(found["quantised_loss"] / found["plain_loss"])
    assert 0.95 < found["loss_ratio"] < 1.05
    assert 0 < found["kl"] < 0.05
    assert 0.7 < found["same_sampled"] <= 1
    with pytest.raises(SystemExit, match="shorter than a window"):
        weights_quality.main([*asked, "--length", "100000"])


@needs_int8
def test_speed_of_weights_is_told_beside_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--batches", "1", "2", "--rounds", "1", "--new-tokens", "3"]
    weights_speed.main(["--config", str(scenario_folder() / "tiny.yaml"), *few])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["batch"] for row in found["rows"]] == [1, 2]
    for row in found["rows"]:
        assert set(row["tokens_per_s"]) == {"auto", "int8", "int4", "auto again"}
        median, least, most = row["int8"]
        assert least == median == most > 0


def test_the_speed_with_a_drafter_is_told_of_all_recorded_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rounds.jsonl"
    file.write_text(
        "".join(
            json.dumps({"alone": {"edits": 10.0, "turns": 5.0}, "with": {"edits": a, "turns": b}})
            + "\n"
            for a, b in ((30.0, 10.0), (20.0, 20.0), (40.0, 15.0))
        )
    )
    drafter_speed.main(["--rounds", "0", "--record", str(file)])
    *lines, document = capsys.readouterr().out.splitlines()
    assert lines[0] == "with over alone, edits: 3.000 (2.500 to 3.500)"
    found = json.loads(document)
    assert found["rounds"] == 3
    assert {part: one["median"] for part, one in found["over"]["with"].items()} == {
        "edits": 3.0,
        "turns": 3.0,
        "all": 3.0,
    }


def test_a_pool_without_the_drafter_is_not_measured() -> None:
    with pytest.raises(SystemExit, match="the pool has no twin"):
        drafter_speed.main(["--drafter", "twin", "--rounds", "1"])


@pytest.mark.parametrize("weights", ["auto", pytest.param("int8", marks=needs_int8)])
def test_the_time_of_a_token_is_told_part_by_part(
    weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--batches", "1", "2", "--rounds", "1", "--new-tokens", "3", "--weights", weights]
    token_profile.main(["--config", str(scenario_folder() / "tiny.yaml"), *few])
    *_, last = capsys.readouterr().out.splitlines()
    of_model = [{"  head", "  attention", "  norms", "  query, key, value", "  gate, up"}]
    if weights == "int8":  # in the C library
        of_model.append({"  layers and head in C"})
    for row in json.loads(last)["rows"]:
        ms = row["ms"]
        assert row["share"] > 0
        parts = [name for name in ms if name.startswith("  ")]
        assert any(each <= {*parts} for each in of_model)
        assert sum(ms[name] for name in parts) == pytest.approx(
            ms["pass of the target, with clocks"]
        )


def test_calibration_is_of_the_smallest_drafter_and_the_largest_between() -> None:
    def chains(*names: str) -> list[tuple[str, ...]]:
        pool: Any = SimpleNamespace(
            names=names, models=tuple(name for name in names if name != "ngram")
        )
        return calibration._chains(pool)

    assert chains("ngram", "small", "middle", "large", "target") == [
        ("small", "target"),
        ("small", "large", "target"),
    ]
    assert chains("small", "target") == [("small", "target")]
    with pytest.raises(SystemExit, match="no drafter"):
        chains("ngram", "target")


@pytest.mark.parametrize("size", [1, 7, 60])
def test_calibration_counts_no_nodes_that_were_not_judged(size: int) -> None:
    known, judged, before = Calibration(), 0.0, 0.0
    stated = np.full(size, 0.5)
    for turn in range(1, 31):
        for _ in range(600 // size):
            known.record(stated, np.zeros(size, np.int64), stated > 0.6)
        after = known.figures().nodes
        judged, before = judged + calibration._added(before, after), after
        added = turn * (600 // size * size)
        assert 0.8 * added < judged <= added * (1 + 1e-6)


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_calibration_is_measured_at_any_temperature(
    temperature: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "code.jsonl"
    file.write_text(json.dumps({"prompt": "def fib(n):"}))
    options = {"--nodes": "1", "--turns": "1", "--batch": "1", "--new-tokens": "12"}
    options |= {"--temperature": temperature, "--prompts": str(file), "--budgets": "2"}
    arguments = [part for option in options.items() for part in option]
    monkeypatch.setattr(sys, "argv", ["calibration", *arguments])
    calibration.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["chain"][0] for row in found["calibration"]] == ["tiny-1m", "tiny-1m"]
    assert all(row["nodes"] > 0 for row in found["calibration"])
    assert len(found["budgets"]) == 2


def test_the_most_that_can_be_gained_is_of_the_best_way(capsys: pytest.CaptureFixture[str]) -> None:
    few = "--batches 2 --depths 1 2 --shares 1 3 --cycles 6 --rounds 1 --width 2"
    ceiling.main(few.split())
    header, line, last = capsys.readouterr().out.splitlines()
    [found] = json.loads(last)["batches"]
    ways = {(way["way"]["depth"], way["way"]["nodes"]): way for way in found["ways"]}
    assert set(ways) == {(1, 2), (2, 2), (2, 6)}, "depth 1 has four nodes"
    assert all(1.0 <= way["tokens"] <= 1.0 + depth for (depth, _), way in ways.items())
    assert all(way["drafted"] <= way["free"] for way in ways.values()), "to three places"
    assert found["free"] == max(1.0, *(way["free"] for way in ways.values()))
    assert f"{found['free']:.2f} x if drafts are free" in line
    assert "tiny-8m, trees of width 2" in header


def test_who_gains_nothing_is_told_so() -> None:
    rounds = [[ceiling.Gain(ceiling.Way(1, 4), 1.4, free, 0.7)] for free in (0.8, 0.9, 1.2)]
    row = ceiling._row(4, rounds)
    assert (row["free"], row["drafted"]) == (1.0, 1.0)
