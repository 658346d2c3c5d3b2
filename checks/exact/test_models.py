"""Families of every architecture: like enough to draft for one another, and served exactly."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from checks.exact.oracle import Oracle
from specrouter import ChainRouter, SamplingParams, Speculation
from test_support.factories import SLIDING_WINDOW, VOCAB_SIZE
from test_support.families import NAMES, pool_settings, save_family

PADDED = [  # tied, capped, untied, with a biased output
    "llama",
    "gemma2",
    *(pytest.param(name, marks=pytest.mark.exact) for name in ("gpt-neox", "phi")),
]
PADDING = (24, 0, 7)
NEW_TOKENS = 16
PROMPTS = [
    tuple(np.random.default_rng(row).integers(0, VOCAB_SIZE, length).tolist())
    for row, length in enumerate((1, 5, 3 * SLIDING_WINDOW))
]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


def oracle_of(path: Path) -> Oracle:
    return Oracle(path, "float64", vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())


@pytest.mark.parametrize("architecture", PADDED)
def test_a_padded_family_serves_the_tokens_of_its_target(architecture: str, tmp_path: Path) -> None:
    paths = save_family(tmp_path, architecture, padding=PADDING)
    params = replace(GREEDY, max_new_tokens=NEW_TOKENS)
    contexts = torch.randint(VOCAB_SIZE, (1, 50), generator=torch.Generator().manual_seed(1))
    for path, rows in zip(paths.values(), PADDING, strict=True):
        with torch.inference_mode():
            best = oracle_of(path).model(contexts).logits.argmax(-1)
        assert (best >= VOCAB_SIZE).any() == (rows > 0), "padding that is never best tests nothing"
    oracle = oracle_of(paths["target"])
    wanted = [oracle.generate(prompt, params) for prompt in PROMPTS]
    settings = {
        "pool": pool_settings(paths),
        "engine": {"max_requests": 4, "max_model_len": 64, "prefill_chunk": 16, "preload": False},
    }
    seeded = replace(params, temperature=1.5, top_k=0, seed=5)
    chain = Speculation(chain=NAMES, depth=3)
    with ChainRouter.from_config(settings) as router:
        served = router.generate(PROMPTS, params, speculation=chain)
        drafted = router.generate(PROMPTS, seeded, speculation=chain)
        alone = router.generate(PROMPTS, seeded, speculation="off")
    assert [tuple(output.token_ids) for output in served] == wanted
    assert [output.token_ids for output in drafted] == [output.token_ids for output in alone]
    assert all(max(output.token_ids) < VOCAB_SIZE for output in (*served, *drafted))
