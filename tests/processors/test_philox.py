"""Words at any places are the words that numpy draws one after the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.noise import gumbel, gumbel_at
from processors.philox import word_at

WORD = st.integers(0, 2**64 - 1)


@given(WORD, WORD, WORD)
def test_words_are_numpys(seed: int, stream: int, position: int) -> None:
    keys = np.array([seed, stream], dtype=np.uint64)
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    wanted = np.random.Philox(key=keys, counter=counter).random_raw(50)
    index = np.random.default_rng(0).permutation(50)
    got = word_at(np.repeat(keys[:, None], 50, axis=1), counter[1], index)
    assert np.array_equal(got, wanted[index])


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_noise_at_some_ids_is_the_noise_of_all(size: int) -> None:
    ids = np.random.default_rng(1).integers(0, 5000, size)
    seeds, streams = np.array([3, 2**64 - 1], dtype=np.uint64), np.array([0, 2**33])
    which = ids % 2
    got = gumbel_at(seeds[which], streams[which], np.array([8, 900])[which], ids)
    for row in (0, 1):
        own = which == row
        wanted = gumbel(int(seeds[row]), (8, 900)[row], 5000, int(streams[row]))
        np.testing.assert_allclose(got[own], wanted[ids[own]], rtol=0, atol=1e-15)
