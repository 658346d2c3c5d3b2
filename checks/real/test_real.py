"""What of the checks of released models needs none of them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checks.real import files, quality
from checks.real.prompts import chats
from checks.real.quality import Compared
from checks.real.same_text import Key, Result, Results
from test_support.arrangements import ARRANGEMENTS, REFERENCE, Arrangement, Served

KEY = Key(model="m", drafter="suffix", mode="greedy", arrangement="on", chats=2, build="build")
RESULT = Result(key=KEY, differing=[], missing=[], signs={"accepted": 3}, seconds=0.5, texts=[])
SERVED = Served(
    texts=((1, 2), (3, 4)),
    logprobs=((-0.5, -0.25), (-1.0, -2.0)),
    signs={"accepted": 1, "cached": 0, "together": 1, "chunks": 1, "preempted": 0},
)


def test_there_are_a_hundred_chats_and_each_is_another() -> None:
    assert len(list(chats())) == len(set(chats())) == 100


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda one: str(one.name))
def test_an_arrangement_that_did_not_come_about_is_told_of(arrangement: Arrangement) -> None:
    others = [sign for sign in arrangement.shows if sign != "accepted"]
    assert SERVED.missing(arrangement) == others
    assert SERVED.missing(REFERENCE) == []


def test_texts_and_bits_that_differ_are_counted() -> None:
    other = replace(SERVED, texts=((1, 2), (3, 5)), logprobs=((-0.5, -0.26), (-1.0, -2.0)))
    assert other.differing(SERVED.texts) == [1]
    assert replace(SERVED, before=other.texts).differing(SERVED.texts) == [1]
    assert other.differing_in_bits(SERVED) == [0]


def test_a_run_that_was_stopped_goes_on_with_what_it_had(tmp_path: Path) -> None:
    Results(tmp_path).add(RESULT)
    with (tmp_path / "results.jsonl").open("a") as stream:
        stream.write(json.dumps({"key": {}})[:-4])
    again = Results(tmp_path)
    assert again[KEY] == RESULT
    other = replace(RESULT, key=replace(KEY, mode="seed 1"))
    again.add(other)
    assert Results(tmp_path)[other.key] == other
    assert replace(KEY, build="another") not in again
    assert replace(RESULT, differing=[1]).failed
    assert replace(RESULT, missing=["accepted"]).failed
    assert not RESULT.failed


def test_a_file_of_the_folder_is_taken_before_that_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECROUTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "download", lambda wanted: Path("downloaded", wanted.name))
    name = files.FILES["gemma3"].name
    assert files.find("gemma3", tmp_path) == Path("downloaded", name)
    kept = tmp_path / "cache" / "released" / name
    for place in (kept, tmp_path / name):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"")
        assert files.find("gemma3", tmp_path) == place


def test_a_distribution_lies_at_no_distance_from_itself_and_farther_the_more_it_differs() -> None:
    exact = torch.log_softmax(torch.randn(50, generator=torch.Generator().manual_seed(0)), 0)
    likeliest = {int(token): float(exact[token]) for token in exact.topk(20).indices}
    assert quality._divergence(exact, likeliest) == pytest.approx(0, abs=1e-6)
    first, second, *_ = likeliest
    distances = []
    for share in (0.1, 0.2):
        moved = dict(likeliest)
        moved[first] = math.log(math.exp(moved[first]) * (1 - share))
        moved[second] = math.log(math.exp(moved[second]) + math.exp(likeliest[first]) * share)
        distances.append(quality._divergence(exact, moved))
    assert 0 < distances[0] < distances[1]


def test_the_ratio_of_two_that_are_alike_is_one() -> None:
    places = [Compared(float(one), True) for one in range(1, 200)]
    found = quality._ratio(places, places)
    assert found["of means"] == found["low"] == found["high"] == 1.0
