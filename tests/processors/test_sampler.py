"""A row's choice depends on its logits, its settings and its position, and on nothing beside it."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from processors.noise import gumbel
from processors.sampler import Sampler, SamplingSettings, process_logits

VOCAB = 50
GREEDY = SamplingSettings(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def random_logits(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(count, VOCAB, generator=drawn, dtype=torch.float64)).to(dtype)


def warped(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """[1, V] what `transformers` makes of [1, V]: temperature, top-k, top-p."""
    scores = logits.double() / settings.temperature
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    if settings.top_k:
        scores = TopKLogitsWarper(settings.top_k)(nothing, scores)
    if settings.top_p < 1.0:
        scores = TopPLogitsWarper(settings.top_p)(nothing, scores)
    return scores


def open_rows(*settings: SamplingSettings) -> Sampler:
    sampler = Sampler(VOCAB, window=16)
    for row, one in enumerate(settings):
        sampler.open(row, one)
    return sampler


def choose(sampler: Sampler, logits: Tensor, rows: list[int], positions: list[int]) -> list[int]:
    chosen: list[int] = sampler.choose(logits, np.array(rows), np.array(positions)).tolist()
    return chosen


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB, 10 * VOCAB])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_processing_equals_that_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    settings = SamplingSettings(temperature, top_k, top_p, seed=0)
    logits = random_logits(20)
    got = process_logits(logits, [settings] * 20)
    for index in range(20):
        wanted = warped(logits[index : index + 1], settings)[0]
        torch.testing.assert_close(got[index], wanted, rtol=1e-14, atol=0)


def test_rows_of_one_batch_are_processed_each_by_its_own_settings() -> None:
    settings = [
        SamplingSettings(1.0, 0, 1.0, 0),
        SamplingSettings(0.5, 3, 1.0, 0),
        SamplingSettings(2.0, 0, 0.7, 0),
        SamplingSettings(0.8, 7, 0.6, 0),
        SamplingSettings(0.8, 1, 0.6, 0),
    ]
    logits = random_logits(5)
    together = process_logits(logits, settings)
    for index, one in enumerate(settings):
        alone = process_logits(logits[index : index + 1], [one])[0]
        assert torch.equal(together[index], alone)
        torch.testing.assert_close(alone, warped(logits[index : index + 1], one)[0])


def test_processing_leaves_the_logits_as_they_are() -> None:
    logits = random_logits(2)
    before = logits.clone()
    process_logits(logits, [SamplingSettings(0.5, 3, 0.5, 0)] * 2)
    assert torch.equal(logits, before)


def test_ties_of_the_kth_largest_stay() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, 3.0, 0.0]])
    kept = process_logits(logits, [SamplingSettings(1.0, 2, 1.0, 0)])[0].isfinite()
    assert kept.tolist() == [False, True, True, True, False]


def test_top_p_breaks_ties_to_the_lowest_id() -> None:
    logits = torch.zeros(1, 4)
    kept = process_logits(logits, [SamplingSettings(1.0, 0, 0.5, 0)])[0].isfinite()
    assert kept.tolist() == [True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_greedy_takes_the_largest_and_the_lowest_id_of_several(dtype: torch.dtype) -> None:
    logits = random_logits(1, dtype=dtype).clamp(max=1.0)
    ties = (logits[0] == logits.max()).nonzero()[:, 0].tolist()
    assert len(ties) > 2
    assert choose(open_rows(GREEDY), logits, [0], [0]) == [ties[0]]


def test_a_sampled_token_is_the_largest_of_the_perturbed_logits() -> None:
    settings = SamplingSettings(0.8, 0, 1.0, seed=9)
    sampler, logits = open_rows(settings), random_logits(1)
    for position in range(20):
        wanted = int((logits[0].numpy() / 0.8 + gumbel(9, position, VOCAB)).argmax())
        assert choose(sampler, logits, [0], [position]) == [wanted]


def test_what_top_k_excludes_is_never_chosen() -> None:
    settings = SamplingSettings(5.0, 3, 1.0, seed=1)
    sampler, logits = open_rows(settings), random_logits(1)
    best = logits[0].topk(3).indices.tolist()
    chosen = {choose(sampler, logits, [0], [position])[0] for position in range(200)}
    assert chosen == set(best)


def test_logits_may_be_fewer_than_the_noise() -> None:
    settings = SamplingSettings(1.0, 0, 1.0, seed=2)
    logits = random_logits(1)[:, :30]
    wanted = int((logits[0].numpy() + gumbel(2, 0, 30)).argmax())
    assert choose(open_rows(settings), logits, [0], [0]) == [wanted]


def test_a_choice_does_not_depend_on_its_neighbours() -> None:
    settings = [
        SamplingSettings(1.0, 0, 1.0, 1),
        GREEDY,
        SamplingSettings(0.7, 4, 0.8, 1),
        SamplingSettings(1.5, 0, 0.5, 2),
        GREEDY,
    ]
    rows = [0, 0, 1, 2, 2, 3, 4]
    positions = [4, 5, 0, 7, 8, 0, 2]
    logits = random_logits(len(rows), seed=4)
    together = choose(open_rows(*settings), logits, rows, positions)
    for index, row in enumerate(rows):
        alone = choose(open_rows(*settings), logits[index : index + 1], [row], [positions[index]])
        assert together[index : index + 1] == alone
    order = [5, 2, 0, 6, 4, 1, 3]
    shuffled = choose(
        open_rows(*settings), logits[order], [rows[i] for i in order], [positions[i] for i in order]
    )
    assert shuffled == [together[i] for i in order]


def test_rows_opened_before_and_after_the_first_choice_are_alike() -> None:
    settings = SamplingSettings(1.0, 0, 1.0, 3)
    sampler, logits = open_rows(settings), random_logits(1)
    first = choose(sampler, logits, [0], [1])
    sampler.open(1, settings)
    assert choose(sampler, logits, [1], [1]) == first


def test_a_closed_row_takes_its_settings_along() -> None:
    sampler = open_rows(SamplingSettings(1.0, 0, 1.0, 3))
    choose(sampler, random_logits(1), [0], [1])
    sampler.close(0)
    sampler.open(0, GREEDY)
    assert choose(sampler, random_logits(1), [0], [1]) == [int(random_logits(1).argmax())]
