"""A row's choice depends on its logits, settings, text and position, and on nothing beside it."""

import dataclasses
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from processors.noise import NoiseBank, gumbel
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings
from tests.processors.sampling import (
    FULL,
    GREEDY,
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


def choose(sampler: Sampler, logits: Tensor, rows: list[int], positions: list[int]) -> list[int]:
    chosen: list[int] = sampler.choose(logits, contexts_at(rows, positions))[0].tolist()
    return chosen


# Processing


def test_settings_that_are_no_numbers_are_refused() -> None:
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        with pytest.raises(ValueError, match=name):
            SamplingSettings(**{name: math.nan})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the bias of 7"):
        SamplingSettings(logit_bias=((3, 1.0), (7, math.nan)))


def test_if_every_id_is_excluded_the_winning_score_says_so() -> None:
    one = SamplingSettings(
        temperature=1.0,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        bad_words_ids=tuple((t,) for t in range(VOCAB)),
    )
    for row in (one, dataclasses.replace(one, temperature=0.0)):
        sampler, contexts = open_rows(row), contexts_at([0], [0])
        assert sampler.choose(random_logits(1), contexts)[1].tolist() == [-math.inf]
        ids, log_probabilities = sampler.rank(random_logits(1), contexts, 2)
        assert ids.shape == (1, 2)
        assert log_probabilities.tolist() == [[-math.inf, -math.inf]]


# Choices


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_greedy_takes_the_largest_and_the_lowest_id_of_several(dtype: torch.dtype) -> None:
    logits = random_logits(1, dtype=dtype).clamp(max=1.0)
    ties = (logits[0] == logits.max()).nonzero()[:, 0].tolist()
    assert len(ties) > 2
    assert choose(open_rows(GREEDY), logits, [0], [0]) == [ties[0]]
    ids, _ = open_rows(GREEDY).rank(logits, contexts_at([0], [0]), 2)
    assert ids[0, 0] == ties[0]
    assert ids[0, 1] in ties[1:]


def test_a_sampled_token_is_the_largest_of_the_perturbed_logits() -> None:
    sampler, logits = (
        open_rows(SamplingSettings(temperature=0.8, seed=9, stream=2)),
        random_logits(1),
    )
    for position in range(20):
        perturbed = logits[0].numpy() / 0.8 + gumbel(9, position, VOCAB, stream=2)
        ids, values = sampler.choose(logits, contexts_at([0], [position]))
        assert ids.tolist() == [int(perturbed.argmax())]
        assert values.tolist() == [perturbed.max()]


def test_a_row_without_memory_for_its_noise_is_refused_when_it_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, cpu = SamplingSettings(temperature=1.0, seed=3), torch.device("cpu")
    sampler, logits = Sampler(VOCAB, window=16), random_logits(1)
    with monkeypatch.context() as patch:
        patch.setattr(NoiseBank, "_grow", _no_memory)
        sampler.open(0, GREEDY, device=cpu)
        with pytest.raises(MemoryError):
            sampler.open(1, one, device=cpu)
        sampler.close(1)
        greedy = choose(sampler, logits, [0], [1])
    sampler.open(1, one, device=cpu)
    expected = choose(open_rows(GREEDY, one), logits, [1], [1])
    monkeypatch.setattr(NoiseBank, "_grow", _no_memory)  # nothing is missing any more
    assert choose(sampler, logits, [1], [1]) == expected
    assert choose(sampler, logits, [0], [1]) == greedy


def _no_memory(bank: NoiseBank) -> None:
    raise MemoryError("full")


def test_a_closed_row_takes_its_settings_and_text_along() -> None:
    sampler = open_rows(FULL, prompt=PROMPT)
    choose(sampler, random_logits(1), [0], [1])
    sampler.close(0)
    sampler.open(0, GREEDY)
    assert choose(sampler, random_logits(1), [0], [1]) == [int(random_logits(1).argmax())]
    sampler.close(0)
    sampler.open(0, FULL)
    got = sampler.scores(random_logits(1), contexts_at([0], [1]))[0]
    assert torch.equal(got, scores_of(FULL, random_logits(1), 1, prompt=(), output=()))


some_settings = st.builds(
    SamplingSettings,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 1, 6]),
    top_p=st.sampled_from([0.4, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 1.0]),
    logit_bias=st.sampled_from([(), ((2, 4.0), (7, -3.0))]),
    min_tokens=st.sampled_from([0, 3]),
    end_token_ids=st.sampled_from([(), (1, 2)]),
    bad_words_ids=st.sampled_from([(), ((9,),), WORDS, ((7, 13),)]),
    logits_processors=st.sampled_from([(), (Shift(),)]),
    stream=st.integers(0, 3),
)
some_tokens = st.lists(st.integers(3, 12), max_size=5)


def test_errors_of_some_rows_are_forgotten() -> None:
    broken = SamplingSettings(logits_processors=(Broken(),))
    sampler = open_rows(broken, GREEDY, broken)
    choose(sampler, random_logits(2), [0, 2], [0, 0])
    sampler.forget_errors(np.array([1, 2]))
    assert list(sampler.take_errors()) == [0]


def test_errors_end_with_their_row() -> None:
    sampler = open_rows(SamplingSettings(logits_processors=(Broken(),)))
    choose(sampler, random_logits(1), [0], [0])
    sampler.close(0)
    assert sampler.take_errors() == {}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_context_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(some_settings, some_tokens, some_tokens), min_size=1))
    places = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(rows) - 1), some_tokens, st.integers(0, 15)), min_size=1
        )
    )
    with torch.inference_mode():
        sampler = Sampler(VOCAB, window=16)
        for row, (one, prompt, output) in enumerate(rows):
            sampler.open(row, one, prompt, output)
        logits = random_logits(len(places), seed=4)
        together = sampler.scores(
            logits,
            contexts_at(
                [row for row, _, _ in places],
                [position for _, _, position in places],
                [path for _, path, _ in places],
            ),
        )
        for index, (row, path, position) in enumerate(places):
            one, prompt, output = rows[row]
            alone = scores_of(one, logits[index : index + 1], position, path, prompt, output)
            assert torch.equal(together[index], alone)


@settings(max_examples=40, deadline=None)
@given(st.lists(some_settings, min_size=1, max_size=3), st.data())
def test_many_contexts_are_worked_on_in_parts_to_the_same_bits(
    rows: list[SamplingSettings], data: st.DataObject
) -> None:
    which = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=9))
    children = data.draw(
        st.lists(st.tuples(st.integers(0, len(which) - 1), st.integers(0, VOCAB)), max_size=6)
    )
    parents, tokens = (np.array([c[part] for c in children], dtype=np.int64) for part in (0, 1))
    with torch.inference_mode():
        sampler, logits = open_rows(*rows, prompt=PROMPT), random_logits(len(which), seed=5)
        places = list(range(len(which)))
        contexts = contexts_at(which, places, [[7] * (place % 3) for place in places])
        whole = [
            *sampler.choose(logits, contexts),
            *sampler.rescore(logits, contexts, parents, tokens),
            *sampler.rank(logits, contexts, 3),
        ]
        with mock.patch("processors.logits._CPU_PART", 2 * VOCAB):
            pieces = [
                *sampler.choose(logits, contexts),
                *sampler.rescore(logits, contexts, parents, tokens),
                *sampler.rank(logits, contexts, 3),
            ]
    assert all(torch.equal(got, wanted) for got, wanted in zip(pieces, whole, strict=True))


@settings(max_examples=60, deadline=None)
@given(some_settings, some_tokens, some_tokens, some_tokens, some_tokens)
def test_a_path_counts_like_committed_tokens(
    one: SamplingSettings, prompt: list[int], output: list[int], path: list[int], more: list[int]
) -> None:
    with torch.inference_mode():
        sampler, logits = Sampler(VOCAB, window=16), random_logits(1)
        sampler.open(0, one, prompt, output)
        for tokens, ahead in ((path, more), (more, path)):
            drafted = sampler.scores(logits, contexts_at([0], [9], [tokens + ahead])).clone()
            halfway = sampler.scores(logits, contexts_at([0], [9], [tokens])).clone()
            sampler.extend(0, tokens)
            assert torch.equal(sampler.scores(logits, contexts_at([0], [9])), halfway)
            assert torch.equal(sampler.scores(logits, contexts_at([0], [9], [ahead])), drafted)


# Log-probabilities and distributions


def test_rows_that_look_at_their_text_need_paths() -> None:
    reading = {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "bad_words_ids": ((1,), (1, 2)),
        "logits_processors": (Shift(),),
    }
    off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    blind: dict[str, Any] = {**vars(FULL), **off, "bad_words_ids": ((9,),)}
    settings = [SamplingSettings(**{**blind, name: value}) for name, value in reading.items()]
    sampler = open_rows(SamplingSettings(**blind), *settings)
    assert not sampler.needs_paths(np.array([0, 0]))
    assert all(sampler.needs_paths(np.array([0, row])) for row in range(1, len(reading) + 1))


@pytest.mark.parametrize("one", [GREEDY, SamplingSettings(temperature=0.8, seed=1), FULL])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, VOCAB])
def test_the_best_are_ranked_with_their_log_probabilities(
    one: SamplingSettings, dtype: torch.dtype, width: int
) -> None:
    sampler, logits = open_rows(one, GREEDY, prompt=PROMPT), random_logits(2, dtype=dtype)
    contexts = contexts_at([0, 1], [2, 2])
    wanted = sampler.scores(logits, contexts).double().log_softmax(-1)
    ids, ranked = sampler.rank(logits, contexts, width)
    assert all(len(set(line)) == width for line in ids.tolist())
    assert ranked.dtype == torch.float64
    torch.testing.assert_close(ranked, wanted.gather(1, ids), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ranked, wanted.topk(width).values, rtol=1e-5, atol=1e-5)
    assert (ranked <= 0).all()
    assert (ranked.diff() <= 0).logical_or(ranked[:, 1:].isinf()).all()


def test_judging_is_choosing_and_looking_up() -> None:
    sampler, logits = open_rows(FULL, GREEDY, prompt=PROMPT), random_logits(3)
    contexts = contexts_at([0, 0, 1], [3, 4, 5], [[], [7], []])
    parents, tokens = np.array([2, 0, 0, 1, 2]), np.array([3, 30, 7, 20, VOCAB])
    choices, winning, own, others = sampler.rescore(logits, contexts, parents, tokens)
    chosen = sampler.choose(logits, contexts)
    assert torch.equal(choices, chosen[0])
    assert torch.equal(winning, chosen[1])
    wanted = sampler.scores(logits, contexts).log_softmax(-1)
    torch.testing.assert_close(own, wanted[torch.arange(3), choices])
    torch.testing.assert_close(others[:4], wanted[parents[:4], tokens[:4]])
    assert others[4] == -math.inf


def test_scores_are_the_processed_logits_and_the_noise() -> None:
    one = dataclasses.replace(FULL, stream=2)
    greedy = dataclasses.replace(FULL, temperature=0.0)
    sampler, logits = open_rows(one, greedy, GREEDY, prompt=PROMPT), random_logits(3)
    got = sampler.scores(logits, contexts_at([0, 1, 2], [4, 4, 4]))
    assert got.dtype == torch.float64
    processed = [edited(logits[row : row + 1], FULL, PROMPT, [])[0] for row in (0, 1)]
    noise = torch.from_numpy(gumbel(one.seed, 4, VOCAB, one.stream))
    torch.testing.assert_close(got[0], warped(processed[0][None], one)[0] + noise)
    torch.testing.assert_close(got[1], processed[1])
    assert torch.equal(got[2], logits[2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("scores", [[-math.inf] * VOCAB, [math.inf] + [0.0] * (VOCAB - 1)])
def test_where_no_choice_can_be_made_its_score_is_not_finite(
    temperature: float, scores: list[float]
) -> None:
    sampler, contexts = (
        open_rows(SamplingSettings(temperature=temperature)),
        contexts_at([0, 0], [0, 1]),
    )
    logits = torch.stack((torch.tensor(scores, dtype=torch.float64), random_logits(1)[0]))
    assert sampler.choose(logits, contexts)[1].isfinite().tolist() == [False, True]


@pytest.mark.parametrize("one", [GREEDY, SamplingSettings(temperature=0.8, seed=1), FULL])
def test_nan_comes_through(one: SamplingSettings) -> None:
    sampler, logits = open_rows(one, GREEDY), random_logits(3)
    logits[0, 17] = math.nan
    logits[1] = math.nan
    contexts = contexts_at([0, 0, 1], [2, 3, 0])
    found = [
        sampler.choose(logits, contexts)[1],
        sampler.rank(logits, contexts, 1)[1].sum(1),
        sampler.rank(logits, contexts, 3)[1].sum(1),
        *sampler.rescore(logits, contexts, np.arange(3), np.full(3, 5))[2:],
    ]
    for values in found:
        assert values.isnan().tolist() == [True, True, False]


# Many contexts, large vocabularies, drafts


@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (0.7, 1.3), (0.0, 1.0)])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_drafts_are_ranked_as_the_choice_is_up_to_float32(
    temperatures: tuple[float, float], top_p: float
) -> None:
    rows = [
        SamplingSettings(temperature=t, top_p=top_p, seed=i) for i, t in enumerate(temperatures)
    ]
    sampler, logits = open_rows(*rows), random_logits(2, dtype=torch.float32)
    contexts = contexts_at([0, 1], [2, 2])
    ids, ranked = sampler.rank(logits, contexts, 3)
    exact_ids, exact = sampler.rank(logits.double(), contexts, 3)
    assert torch.equal(ids, exact_ids)
    torch.testing.assert_close(ranked, exact, rtol=1e-5, atol=1e-5)
