"""Structured texts are those of `transformers` and `llguidance` under every arrangement."""

import copy
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path as Folder
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer

from checks.exact.arguments import open_oracle
from checks.exact.arrangement import SELECTIONS, Arrangement, Mode, Routed, modes_of, policies_of
from checks.exact.comparison import Case, all_divergences, compare
from checks.exact.oracle import Oracle
from processors.grammar import Path
from specrouter import ChainRouter, SamplingParams, Speculation, Structure
from test_support.chi_square import fit_p_value
from test_support.families import NAMES, pool_settings, save_family
from test_support.routers import assert_whole
from test_support.structures import STRUCTURES, Reference

PROMPTS = ((17, 230, 41), (5, 301, 64, 99, 12), (250, 1))
NEW = 14


@pytest.fixture(scope="module")
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    settings = copy.deepcopy(small_config)
    settings["pool"]["models"].append({"name": "ngram", "source": "ngram"})
    with ChainRouter.from_config(settings) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokens(router: ChainRouter) -> LLTokenizer:
    tokenizer: Any = router.pool.tokenizer
    return from_tokenizer(tokenizer, router.pool.vocab_size, sorted(router.pool.eos_token_ids))


def ways_of(router: ChainRouter) -> list[Arrangement]:
    """Every kind of chain, and what may be changed about its trees."""
    rows = [
        Arrangement(mode=mode, batch=8)
        if isinstance(mode, str)
        else Arrangement(mode=mode, batch=8, depth=5, width=1 + 2 * (index % 2))
        for index, mode in enumerate(modes_of(router))
    ]
    shallow = (Arrangement(mode=NAMES, batch=8, depth=2, width=width) for width in (1, 2))
    policies: list[Mode] = [mode for mode in policies_of(router) if isinstance(mode, Routed)]
    chosen = [
        Arrangement(
            mode=Routed("static", NAMES),
            batch=8,
            depth=4,
            width=3,
            urgent=True,
            trees=(("selection", selection), ("budget_tokens", 40)),
        )
        for selection in SELECTIONS
    ]
    shaped = [
        Arrangement(
            mode=Routed("static", NAMES), batch=8, depth=3, width=2, trees=(("selection", name),)
        )
        for name in ("whole", "adaserve", "specinfer", "greedy-of-a-form")
    ]
    return [
        *rows,
        *shallow,
        *(Arrangement(mode=mode, batch=8) for mode in policies),
        *chosen,
        *shaped,
    ]


def settings_of(index: int, structure: Structure) -> SamplingParams:
    several: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2},
        {"temperature": 0.8, "top_p": 0.9, "logit_bias": {40: 3.0}, "bad_words_ids": ((44,),)},
    ]
    changed = several[index % len(several)]
    return SamplingParams(max_new_tokens=NEW, seed=index, structure=structure, **changed)


@pytest.fixture(scope="module")
def cases(router: ChainRouter) -> list[Case]:
    """Each structure greedy and sampled in some way, and neighbours without a structure."""
    oracle, found = open_oracle(router, "float64"), list[Case]()
    for index, (structure, sampled) in enumerate(itertools.product(STRUCTURES, (False, True))):
        setting = 1 + index // 2 % 3 if sampled else 0
        prompt, params = PROMPTS[index % len(PROMPTS)], settings_of(setting, structure)
        found.append(Case(prompt, params, oracle.tokens(prompt, params)))
        if index < 4:
            plain = dataclasses.replace(params, structure=None)
            found.append(Case(prompt, plain, oracle.tokens(prompt, plain)))
    return found


@pytest.mark.exact
def test_tokens_are_those_of_transformers_and_llguidance_under_every_arrangement(
    router: ChainRouter, cases: list[Case]
) -> None:
    speculated = 0
    for row in ways_of(router):
        result = compare(router, cases, row)
        assert not all_divergences([result]), row
        speculated += result.speculated
    assert speculated > 100
    assert_whole(router)


def test_a_request_resumed_after_any_token_ends_alike(
    router: ChainRouter, cases: list[Case]
) -> None:
    case = max((case for case in cases if case.params.structure), key=lambda c: len(c.reference))
    for position in range(len(case.reference)):
        handle = router.submit(case.prompt, case.params, generated=case.reference[:position])
        assert tuple(handle.result(60).token_ids) == case.reference


# Drafts by models alike are often refused for their form; those of others for what they say.
@pytest.mark.exact
@pytest.mark.parametrize(("temperature", "noise"), [(0.0, 0.05), (1.0, 0.05), (1.0, 0.7)])
def test_texts_follow_the_masked_distribution(
    temperature: float, noise: float, tmp_path: Folder, tokens: LLTokenizer
) -> None:
    structure = Structure("choice", json.dumps(["the fox", "then", "thing", "a", "ab", "fox"]))
    pool = pool_settings(save_family(tmp_path, noise=noise))
    pool["models"].append({"name": "ngram", "source": "ngram"})
    engine = {"max_requests": 16, "max_model_len": 64, "preload": False}
    count = 200 if temperature else 4
    with ChainRouter.from_config({"pool": pool, "engine": engine}) as router:
        params = SamplingParams(max_new_tokens=20, temperature=temperature, structure=structure)
        law = text_law(open_oracle(router, "float64"), params, tokens)
        for number, chain in enumerate((("small", "target"), NAMES, ("ngram", *NAMES[1:]))):
            each = [dataclasses.replace(params, seed=number * count + i) for i in range(count)]
            outputs = router.generate([PROMPTS[1]] * count, each, Speculation(chain=chain, depth=3))
            seen = Counter(tuple(output.token_ids) for output in outputs)
            assert seen.keys() <= law.keys()
            counts = np.array([seen[text] for text in law])
            assert fit_p_value(counts, np.array(list(law.values()))) > 1e-4, chain
        assert_whole(router)


def text_law(oracle: Oracle, params: SamplingParams, tokens: LLTokenizer) -> dict[Path, float]:
    """Each text that the structure allows, end included, and how probable it is."""
    assert isinstance(params.structure, Structure)
    prompt, whole = PROMPTS[1], dict[Path, float]()
    reference = Reference(params.structure, tokens, len(prompt))
    asked = dataclasses.replace(params, structure=None, logits_processors=(reference,))
    open_texts: list[tuple[Path, float]] = [((), 1.0)]
    while open_texts:
        text, chance = open_texts.pop()
        scores = oracle.processed_logits(torch.tensor([[*prompt, *text]]), asked, len(prompt))[0]
        law = scores.softmax(-1)
        if params.temperature == 0:
            law = torch.zeros_like(law).index_fill_(0, scores.argmax(), 1.0)
        for token in law.nonzero()[:, 0].tolist():
            longer, p = (*text, token), chance * float(law[token])
            if token in tokens.eos_tokens:
                whole[longer] = p
            else:
                open_texts.append((longer, p))
    return whole
