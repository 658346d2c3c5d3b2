"""A sampler that chooses by kernels says what the sampler says, row by row, whatever the rows."""

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import torch

from processors.contexts import Contexts
from processors.noise import NoiseBank, gumbel
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings
from test_support.triton_interpreter import DEVICE, needs_triton
from tests.processors.sampling import FULL, VOCAB, random_logits

pytestmark = [
    pytest.mark.long,
    needs_triton,
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # of padding
]

PLAIN = [
    SamplingSettings(),
    SamplingSettings(temperature=0.8, seed=3),
    SamplingSettings(temperature=1.0, seed=2**64 - 1),
]
LIMITED = SamplingSettings(temperature=0.9, top_k=5, seed=9)
MIXED = [PLAIN[1], FULL, LIMITED, PLAIN[0], SamplingSettings(temperature=0.7, seed=4, stream=6)]
ROWS = [0, 0, 1, 2, 2, 3, 4, 4, 1]
POSITIONS = [0, 1, 5, 2, 3, 0, 8, 9, 6]


def both(settings: Sequence[SamplingSettings]) -> tuple[Sampler, Sampler]:
    from processors.fused_sampler import FusedSampler

    found = Sampler(VOCAB, window=16), FusedSampler(VOCAB, 16, DEVICE.type)
    for sampler in found:
        for row, one in enumerate(settings):
            sampler.open(row, one, prompt=(3, 4), device=DEVICE)
    return found


def places(settings: Sequence[SamplingSettings]) -> Contexts:
    rows = np.array(ROWS) % len(settings)
    none = np.zeros_like(rows)
    return Contexts(
        rows=rows,
        positions=np.array(POSITIONS),
        depths=none,
        paths=torch.zeros((len(rows), 1), dtype=torch.int64),
    )


@pytest.mark.parametrize(
    "settings", [PLAIN, MIXED, [FULL, LIMITED]], ids=["plain", "mixed", "none"]
)
def test_choices_ranks_and_scores_are_the_samplers(settings: list[SamplingSettings]) -> None:
    own, fused = both(settings)
    contexts, logits = places(settings), random_logits(len(ROWS)).to(DEVICE)
    for mine, theirs in zip(
        own.choose(logits, contexts), fused.choose(logits, contexts), strict=True
    ):
        torch.testing.assert_close(mine, theirs, check_dtype=False, rtol=0, atol=1e-12)
    (ids, shares), (fused_ids, fused_shares) = (
        one.rank(logits, contexts, 4) for one in (own, fused)
    )
    possible = ~shares.isneginf()
    assert torch.equal(ids[possible], fused_ids[possible])
    torch.testing.assert_close(shares, fused_shares, rtol=0, atol=1e-12)
    parents = np.array([8, 0, 3, 3, 5, 1])
    tokens = np.array([4, 1, VOCAB - 1, 7, 0, VOCAB])
    for mine, theirs in zip(
        own.rescore(logits, contexts, parents, tokens),
        fused.rescore(logits, contexts, parents, tokens),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, check_dtype=False, rtol=0, atol=1e-12)


def test_a_plain_row_takes_no_memory_for_noise_where_kernels_draw_it() -> None:
    from processors.fused_sampler import FusedSampler

    logits, fused = random_logits(len(ROWS)).to(DEVICE), FusedSampler(VOCAB, 16, DEVICE.type)
    fused.open(len(PLAIN), LIMITED, device=DEVICE)  # of whose memory plain rows take none
    with mock.patch.object(NoiseBank, "hold_on", side_effect=MemoryError):
        for row, one in enumerate(PLAIN):
            fused.open(row, one, device=DEVICE)
        fused.choose(logits, places(PLAIN))
        ids = np.array([5, 2])
        assert np.allclose(fused.noise_at(1, 4, ids), gumbel(3, 4, VOCAB)[ids], rtol=0, atol=1e-15)
        assert [*fused._noise._bank._keys] == [len(PLAIN)]
        with pytest.raises(MemoryError):
            fused.open(0, LIMITED, device=DEVICE)
