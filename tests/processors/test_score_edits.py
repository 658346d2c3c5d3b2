"""Scores are edited as in `transformers`; a caller's processor harms its row alone."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from processors.noise import gumbel
from processors.sampling_row import SamplingRow, SamplingSettings
from tests.processors.sampling import (
    FULL,
    GREEDY,
    OUTPUT,
    PROMPT,
    VOCAB,
    WORDS,
    Broken,
    Shift,
    contexts_at,
    edited,
    open_rows,
    random_logits,
    scores_of,
    warped,
)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB, 10 * VOCAB])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_warping_equals_that_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    one = SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, seed=0, min_p=min_p)
    logits, noise = random_logits(20), torch.from_numpy(gumbel(0, 2, VOCAB))
    got = open_rows(one).scores(logits, contexts_at([0] * 20, [2] * 20))
    for index in range(20):
        wanted = warped(logits[index : index + 1], one)[0] + noise
        torch.testing.assert_close(got[index], wanted, rtol=1e-14, atol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "changed",
    [
        {"logit_bias": ((7, 2.0), (30, -5.0), (49, -math.inf))},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": -1.2},
        {"frequency_penalty": 0.7},
        {"bad_words_ids": ((9,), (11,))},
        {"bad_words_ids": WORDS},
        {"min_tokens": 4, "end_token_ids": (0, 1)},
        {"min_tokens": 3, "end_token_ids": (0, 1)},
        {"min_tokens": 2},
        {field.name: getattr(FULL, field.name) for field in dataclasses.fields(FULL)},
    ],
)
def test_every_setting_equals_that_of_transformers(
    changed: dict[str, Any], temperature: float
) -> None:
    one = SamplingSettings(**{**changed, "temperature": temperature, "seed": 3})
    for seed in range(10):
        logits = random_logits(1, seed)
        wanted = edited(logits, one, PROMPT, list(OUTPUT))
        if temperature > 0:
            wanted = warped(wanted, one) + torch.from_numpy(gumbel(3, 3, VOCAB))
        got = scores_of(one, logits, position=3)
        assert torch.equal(got.isfinite(), wanted[0].isfinite())
        torch.testing.assert_close(got, wanted[0], rtol=1e-13, atol=1e-13)


def test_rows_hold_back_their_own_phrases_behind_paths_of_any_length() -> None:
    rows = [
        SamplingSettings(bad_words_ids=((9, 30), (6, 9, 31), (3, 4, 5, 6, 9, 32))),
        GREEDY,
        SamplingSettings(bad_words_ids=((6, 33), (9, 8, 34), (1, 3, 4, 5, 6, 35))),
    ]
    sampler = open_rows(*rows, prompt=PROMPT)
    places = {(0, (9,)): [30, 31, 32], (0, ()): [], (1, (9,)): [], (2, ()): [33], (2, (9, 8)): [34]}
    numbers, paths = [row for row, _ in places], [list(path) for _, path in places]
    contexts = contexts_at(numbers, [len(path) for path in paths], paths)
    excluded = sampler.scores(random_logits(len(places)), contexts).isneginf()
    found = [line.nonzero().flatten().tolist() for line in excluded]
    assert found == list(places.values())


def test_a_long_phrase_beside_many_short_ones_takes_no_more_memory_than_its_ids() -> None:
    words = (tuple(range(2000)), *((1, ending) for ending in range(999)))
    row = SamplingRow(SamplingSettings(bad_words_ids=words), PROMPT, OUTPUT, VOCAB)
    assert {length: group.shape for length, group in row.phrases.items()} == {
        2: (999, 2),
        2000: (1, 2000),
    }


# Processors of the caller


def test_processors_run_in_order_on_the_whole_text() -> None:
    seen = list[list[int]]()

    def note(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids[0].tolist())
        return scores + 1.0

    def double(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.mul_(2.0)

    one = SamplingSettings(logits_processors=(note, double))
    logits = random_logits(1)
    got = scores_of(one, logits, 3, path=[9, 9])
    assert seen == [[*PROMPT, *OUTPUT, 9, 9]]
    assert torch.equal(got, (logits[0] + 1.0) * 2.0)


@pytest.mark.parametrize(
    "broken",
    [
        Broken(),
        Broken("scores"),
        Broken(torch.zeros(VOCAB)),
        Broken(torch.full((1, VOCAB), math.nan)),
    ],
)
def test_where_a_processor_fails_nothing_may_be_chosen_and_it_is_reported(broken: Broken) -> None:
    shift = Shift()
    rows = [
        dataclasses.replace(FULL, logits_processors=(broken, shift)),
        dataclasses.replace(FULL, logits_processors=(shift,)),
        GREEDY,
    ]
    sampler, logits = open_rows(*rows, prompt=PROMPT), random_logits(3)
    got = sampler.scores(logits, contexts_at([0, 1, 2], [3, 3, 3]))
    assert bool((got[0] == -math.inf).all())
    for index, row in ((1, rows[1]), (2, GREEDY)):
        alone = scores_of(row, logits[index : index + 1], 3, output=())
        assert torch.equal(got[index], alone)
    errors = sampler.take_errors()
    assert list(errors) == [0]
    assert isinstance(errors[0], RuntimeError | ValueError)
    assert sampler.take_errors() == {}
