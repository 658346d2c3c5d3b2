"""Traces and their prompts: what is read of two formats, and how they are rescaled."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from modelpool.errors import ConfigError
from research.bench.load_requests import fill_prompts, fitted, load_labelled, texts_for
from research.bench.traces import (
    Arrival,
    excerpt,
    poisson,
    rate_per_s,
    read_trace,
    resized,
    stretched,
    urgent_category,
    with_urgent_share,
)

ADASERVE = """emission_time_ms,category,input_tokens,output_tokens,slo_ratio
1000.000,coding,100,256,1.2
3000.000,chat,14,256,-50.0
2500.000,summarization,810,128,-150.0
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.4799600,3180,8
"""


def write(folder: Path, name: str, content: str) -> Path:
    file = folder / name
    file.write_text(content)
    return file


def mix(**counts: int) -> list[Arrival]:
    """One a second; coding is urgent."""
    ratios = {"coding": 1.2, "chat": 2.0, "summarization": 5.0}
    names = [name for name, count in counts.items() for _ in range(count)]
    return [
        Arrival(float(at), name, 10 + at, 100 + at, ratios.get(name))
        for at, name in enumerate(names)
    ]


def test_adaserve_trace_begins_at_0_in_order_and_milliseconds_become_ratios(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, "a.csv", ADASERVE), baseline_ms=25.0)
    assert found == [
        Arrival(0.0, "coding", 100, 256, 1.2),
        Arrival(1.5, "summarization", 810, 128, 6.0),
        Arrival(2.0, "chat", 14, 256, 2.0),
    ]


@pytest.mark.parametrize(
    ("name", "category", "ratio"),
    [("azure_code.csv", "coding", 1.2), ("azure_conv.csv", "chat", 2.0), ("x.csv", "other", None)],
)
def test_azure_trace_has_the_category_of_its_file(
    name: str, category: str, ratio: float | None, tmp_path: Path
) -> None:
    found = read_trace(write(tmp_path, name, AZURE), baseline_ms=25.0)
    assert [arrival.at_s for arrival in found] == pytest.approx([0.0, 1.5])
    assert {(arrival.category, arrival.slo_ratio) for arrival in found} == {(category, ratio)}
    lengths = [(arrival.input_tokens, arrival.output_tokens) for arrival in found]
    assert lengths == [(4808, 10), (3180, 8)]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "begins with neither"),
        ("a,b\n1,2\n", "begins with neither"),
        (ADASERVE.splitlines()[0], "holds no requests"),
        (ADASERVE + "x,chat,1,1,1.0\n", "line 5 of"),
        (ADASERVE + "nan,chat,1,1,1.0\n", "line 5 of .*finite"),
        (ADASERVE + "1,chat,0,1,1.0\n", "line 5 of .*at least 1"),
        (ADASERVE + "1,chat,1,1,0\n", "line 5 of .*slo_ratio"),
        (ADASERVE + "1,chat,1\n", "line 5 of"),
        (AZURE + "yesterday,1,1\n", "line 4 of"),
    ],
)
def test_bad_trace_is_refused_with_its_line(content: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^--trace: .*{complaint}"):
        read_trace(write(tmp_path, "bad.csv", content), 30.0)


def test_poisson_arrivals_have_the_rate_and_the_mix_and_their_seed() -> None:
    found = poisson(4.0, 4000, 25.0, seed=1)
    assert rate_per_s(found) == pytest.approx(4.0, rel=0.1)
    counts = Counter(arrival.category for arrival in found)
    assert counts["coding"] / 4000 == pytest.approx(0.6, abs=0.03)
    ratios = {"coding": 1.2, "chat": 2.0, "summarization": 6.0}
    assert {(a.category, a.slo_ratio) for a in found} == set(ratios.items())
    assert found == poisson(4.0, 4000, 25.0, seed=1) != poisson(4.0, 4000, 25.0, seed=2)


def test_arrivals_are_stretched_and_the_tightest_are_urgent() -> None:
    arrivals = mix(chat=5)
    assert (rate_per_s(arrivals), rate_per_s(stretched(arrivals, 2.0))) == (1.0, 0.5)
    assert rate_per_s(arrivals[:1]) == math.inf
    assert urgent_category(mix(chat=1, coding=1, summarization=1)) == "coding"
    assert urgent_category(mix(other=2, chat=1)) == "chat"
    assert urgent_category(mix(other=2)) is None


def test_excerpt_leaves_out_the_start_and_begins_at_0() -> None:
    assert [a.at_s for a in excerpt(mix(chat=5), skip=2, count=3)] == [0.0, 1.0, 2.0]
    with pytest.raises(ConfigError, match=r"--requests: 4 are asked for.* has 5 .* 2 are left out"):
        excerpt(mix(chat=5), skip=2, count=4)


def test_lengths_are_rescaled_and_fit() -> None:
    arrivals = [Arrival(0.0, "x", 100, 40), Arrival(0.0, "x", 1, 1), Arrival(0.0, "x", 9000, 9000)]
    lengths = [(a.input_tokens, a.output_tokens) for a in resized(arrivals, 0.25, None, 100)]
    assert lengths == [(25, 10), (1, 1), (50, 50)]
    lengths = [(a.input_tokens, a.output_tokens) for a in resized(arrivals, 0.25, 64, 100)]
    assert lengths == [(25, 64), (1, 64), (36, 64)]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.9, 1.0])
def test_redrawn_share_is_exact_and_changes_no_more_than_it_must(share: float) -> None:
    before = mix(coding=30, chat=40, summarization=30)
    after = with_urgent_share(before, share, seed=3)
    assert sum(a.category == "coding" for a in after) == round(100 * share)
    assert [a.at_s for a in after] == [a.at_s for a in before]
    changed = [(b, a) for b, a in zip(before, after, strict=True) if a != b]
    assert len(changed) == abs(round(100 * share) - 30)
    originals = {(a.category, a.input_tokens, a.output_tokens, a.slo_ratio) for a in before}
    assert {(a.category, a.input_tokens, a.output_tokens, a.slo_ratio) for a in after} <= originals
    assert after == with_urgent_share(before, share, seed=3)


def test_share_of_a_trace_with_one_category_cannot_be_redrawn() -> None:
    assert with_urgent_share(mix(coding=4), 1.0, 0) == mix(coding=4)
    for arrivals in (mix(coding=4), mix(other=4)):
        with pytest.raises(ConfigError, match="--urgent-share"):
            with_urgent_share(arrivals, 0.5, 0)


# Prompts


def letters(text: str) -> list[int]:
    """A token for each letter."""
    return [ord(letter) for letter in text]


def test_prompts_are_known_by_file_and_by_category(tmp_path: Path) -> None:
    humaneval = write(tmp_path, "humaneval.jsonl", '{"category": "code", "prompt": "def"}\n')
    lines = '{"category": "qa", "prompt": "why"}\n\n{"category": "summarization", "prompt": "sum"}'
    bench = write(tmp_path, "spec_bench.jsonl", lines)
    texts = load_labelled([humaneval, bench])
    assert texts_for("coding", texts) == ["def"]
    assert texts_for("summarization", texts) == ["sum"]
    assert texts_for("qa", texts) == ["why"]
    assert set(texts_for("chat", texts)) == {"def", "why", "sum"}
    same = write(tmp_path, "code.jsonl", '{"category": "code", "prompt": "def"}\n')
    assert load_labelled([same]) == {"code": ["def"]}, "it counts once"
    labels = ["humaneval", "code", "spec_bench", "qa", "summarization"]
    assert list(texts) == labels, "the same texts are drawn in every process"
    texts = load_labelled([])
    assert texts_for("coding", texts) == texts["code"]
    assert texts_for("chat", texts) == texts_for("summarization", texts) == texts["prose"]
    assert len(texts_for("other", texts)) == 12


@pytest.mark.parametrize(("length", "text"), [(2, "ab"), (3, "abc"), (7, "abcabca")])
def test_prompt_keeps_its_beginning_or_is_repeated(length: int, text: str) -> None:
    assert "".join(map(chr, fitted([ord(letter) for letter in "abc"], length))) == text


def test_every_arrival_gets_a_prompt_of_its_length_and_kind() -> None:
    arrivals = mix(coding=3, chat=3)
    found = fill_prompts(arrivals, {"code": ["aa"], "chat": ["b", "bb"]}, letters, seed=0)
    assert [len(prompt) for prompt in found] == [a.input_tokens for a in arrivals]
    assert [chr(prompt[0]) for prompt in found] == ["a"] * 3 + ["b"] * 3
