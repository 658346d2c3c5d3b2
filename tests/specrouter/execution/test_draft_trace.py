"""A request that asks is told who proposed its tokens, as the models themselves would have it."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.request.output import CycleDraft, RequestOutput
from tests.specrouter.http.client import post

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
        assert None not in draft.tokens, "these models quote nobody"
        walked = [draft.tokens[node] for node in draft.accepted]
        assert walked == gained[: len(walked)]
        assert len(draft.proposed_by) == len(gained) <= len(walked) + 1
        assert [draft.parents[node] for node in draft.accepted] == [-1, *draft.accepted[:-1]][
            : len(walked)
        ]
        assert all(parent < node for node, parent in enumerate(draft.parents))
        assert all(0.0 <= cast(float, probability) <= 1.0 for probability in draft.probabilities)
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
            before = [*text, *cast(tuple[int, ...], draft.tokens[:node])]
            who = draft.chain[draft.proposers[node]]
            assert choice(who, before) == token
            if who == "middle":
                assert choice("small", before) != token
        proposed += draft.proposed_by
        text += output.token_ids[len(text) - len(PROMPT) :][: len(draft.texts)]
    assert set(proposed) == set(NAMES), "each proposed something that was accepted"


def test_of_other_requests_outputs_only_what_was_accepted_is_told(
    small_config: dict[str, Any],
) -> None:
    """One text is the beginning of another one's: what follows there is quoted, mostly in vain."""
    pool, quoter = small_config["pool"], {"name": "suffix", "source": "suffix"}
    settings = {**small_config, "pool": {**pool, "models": [quoter, *pool["models"]]}}
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=1)
    seen = list[dict[str, Any]]()
    with ChainRouter.from_config(settings) as router:
        (secret,) = router.generate([PROMPT], params)
        begun = [*PROMPT, *secret.token_ids[:20]]
        for chain in (["suffix", "target"], ["suffix", "small", "target"]):
            body = {
                "input_ids": begun, "max_new_tokens": 12, "temperature": 1.0, "seed": 2,
                "speculation": {"chain": chain, "depth": 4, "width": 2},
                "ignore_eos": True, "return_drafts": True,
            }  # fmt: skip
            answer = post(router, body).json()
            seen += [one["tree"] for one in answer["drafts"]]
    quoted = 0
    for tree in seen:
        for node, parent in enumerate(tree["parents"]):
            is_quoted = tree["proposed_by"][node] == "suffix"
            told = [tree[name][node] for name in ("token_ids", "texts", "probabilities")]
            if node in tree["accepted"]:
                assert None not in told
            elif is_quoted or (parent >= 0 and tree["token_ids"][parent] is None):
                assert told == [None] * 3
                quoted += is_quoted
            else:
                assert None not in told
    assert quoted > 3
