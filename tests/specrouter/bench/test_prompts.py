"""Prompts of benchmarks: their files, their mixture, and how they are dealt out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from modelpool.errors import ConfigError
from specrouter.bench.prompts import BUILT_IN, BenchPrompt, deal, load_prompts, tokenize


class Letters:
    """A tokenizer with a token for each letter."""

    def __call__(self, text: str) -> Any:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def prompts(**counts: int) -> dict[str, list[BenchPrompt]]:
    return {
        category: [BenchPrompt(category, f"{category}{i}", (i,)) for i in range(count)]
        for category, count in counts.items()
    }


def test_without_files_there_are_a_dozen_prompts_of_three_kinds() -> None:
    texts = load_prompts([])
    assert texts is BUILT_IN
    assert set(texts) == {"code", "mathematics", "prose"}
    assert sum(map(len, texts.values())) == 12


def test_line_has_its_text_under_any_of_four_names(tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    file.write_text(
        '{"id": 1, "prompt": "a"}\n{"question": "b"}\n\n{"text": "c"}\n{"turns": ["d", "e"]}\n'
    )
    assert load_prompts([file]) == {"mixed": ["a", "b", "c", "d"]}


def test_line_ends_where_json_lines_do(tmp_path: Path) -> None:
    file = tmp_path / "ends.jsonl"
    lines = (f'{{"prompt": "a{end}b"}}' for end in "\u2028\u2029\x85")
    file.write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert load_prompts([file]) == {"ends": ["a\u2028b", "a\u2029b", "a\x85b"]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "holds no prompts"),
        ("\n\n", "holds no prompts"),
        ("{nonsense\n", "line 1 .* is not JSON"),
        ('{"prompt": "a"}\n{"answer": "b"}\n', "line 2 .* has none of prompt"),
        ('{"prompt": ""}\n', "line 1 .* has none of prompt"),
        ('{"turns": []}\n', "has none of"),
        ("[1]\n", "has none of"),
    ],
)
def test_bad_file_is_refused_with_its_line(content: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"^--prompts: .*{complaint}"):
        load_prompts([file])


def test_long_prompt_is_cut_from_the_left() -> None:
    found = tokenize({"x": ["abcdef", "ab"]}, Letters(), 3)["x"]
    assert [prompt.text for prompt in found] == ["def", "ab"]
    assert [len(prompt.token_ids) for prompt in found] == [3, 2]


def test_batch_of_one_has_a_run_for_each_category_in_every_round() -> None:
    for number in range(3):
        works = deal(prompts(a=2, b=3), number, 1, 8, 0.0)
        assert [work.category for work in works] == ["a", "b"]
        assert [work.prompts[0].text for work in works] == [f"a{number % 2}", f"b{number % 3}"]


@pytest.mark.parametrize("batch", [2, 3, 4, 16])
def test_round_of_mixed_batches_has_every_category(batch: int) -> None:
    works = deal(prompts(a=2, b=5, c=1), 1, batch, 8, 0.0)
    assert all(len(work.prompts) == batch and work.category is None for work in works)
    found = Counter(prompt.category for work in works for prompt in work.prompts)
    assert set(found) == {"a", "b", "c"}
    assert max(found.values()) - min(found.values()) <= 1


def test_rounds_rotate_through_the_prompts() -> None:
    first, second = (deal(prompts(a=4, b=4), n, 4, 8, 0.0)[0].prompts for n in (0, 1))
    assert not set(first) & set(second)


def test_seeds_differ_within_a_round_and_between_rounds() -> None:
    rounds = [deal(prompts(a=2, b=2, c=2), n, 2, 8, 1.0) for n in (0, 1)]
    seeds = [seed for works in rounds for work in works for seed in work.seeds]
    assert len(set(seeds)) == len(seeds)
    assert rounds[0] == deal(prompts(a=2, b=2, c=2), 0, 2, 8, 1.0)
