"""A request that asks is told who proposed its tokens, as the models themselves would have it."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.request.output import CycleDraft, RequestOutput

PROMPT = [5, 17, 300, 42, 9]
NAMES = ("small", "middle", "target")
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True, return_drafts=True)


@pytest.fixture(scope="module")
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    with ChainRouter.from_config(small_config) as router:
        yield router


def drafts_of(output: RequestOutput) -> list[CycleDraft]:
    assert output.drafts is not None
    return output.drafts


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("chain", [NAMES, ("small", "target"), ("target",)])
def test_cycles_add_up_to_the_output(
    router: ChainRouter, chain: tuple[str, ...], width: int
) -> None:
    (output,) = router.generate([PROMPT], PARAMS, Speculation(chain, depth=3, width=width))
    drafts, place = drafts_of(output), 0
    for cycle, draft in enumerate(drafts, start=1):
        assert draft.cycle == cycle
        gained = output.token_ids[place : place + len(draft.texts)]
        place += len(gained)
        walked = [draft.tokens[node] for node in draft.accepted]
        assert walked == gained[: len(walked)]
        assert len(draft.proposed_by) == len(gained) <= len(walked) + 1
        assert [draft.parents[node] for node in draft.accepted] == [-1, *draft.accepted[:-1]][
            : len(walked)
        ]
        assert all(parent < node for node, parent in enumerate(draft.parents))
        assert all(0.0 <= probability <= 1.0 for probability in draft.probabilities)
        assert len(draft.tokens) == len(draft.proposers) == len(draft.probabilities)
    assert place == len(output.token_ids)
    assert "".join(text for draft in drafts for text in draft.texts) == output.text
    assert sum(len(draft.tokens) for draft in drafts) == output.metrics.drafted_tokens
    if len(chain) == 1:
        assert {name for draft in drafts for name in draft.proposed_by} == {"target"}


def test_a_token_is_put_down_to_the_first_model_that_would_choose_it(router: ChainRouter) -> None:
    """Greedy, width 1: whoever proposed a token finds it the likeliest, and nobody before does."""
    models = {
        name: AutoModelForCausalLM.from_pretrained(router.pool.path(name), dtype=torch.float64)
        for name in NAMES[:-1]
    }

    def choice(name: str, text: Sequence[int]) -> int:
        with torch.no_grad():
            logits = models[name](torch.tensor([list(text)])).logits
        return int(logits[0, -1].argmax())

    (output,) = router.generate([PROMPT], PARAMS, Speculation(NAMES, depth=3, width=1))
    text, proposed = list(PROMPT), list[str]()
    for draft in drafts_of(output):
        for node, token in enumerate(draft.tokens):  # a path: each after those before
            before = [*text, *draft.tokens[:node]]
            who = draft.chain[draft.proposers[node]]
            assert choice(who, before) == token
            if who == "middle":
                assert choice("small", before) != token
        proposed += draft.proposed_by
        text += output.token_ids[len(text) - len(PROMPT) :][: len(draft.texts)]
    assert set(proposed) == set(NAMES), "each proposed something that was accepted"


def test_who_does_not_ask_is_told_nothing_and_gets_the_same_tokens(router: ChainRouter) -> None:
    plain = SamplingParams(max_new_tokens=40, ignore_eos=True)
    outputs = [
        router.generate([PROMPT], params, Speculation(chain, depth=3))[0]
        for params, chain in itertools.product((plain, PARAMS), (NAMES, ("target",)))
    ]
    assert [output.drafts is None for output in outputs] == [True, True, False, False]
    assert len({tuple(output.token_ids) for output in outputs}) == 1
