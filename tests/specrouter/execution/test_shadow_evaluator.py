"""An evaluation says of a drafter what drafting along the same text would have said."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from modelpool import ModelPool
from processors.noise import gumbel
from specrouter import ChainRouter, Speculation
from specrouter.cycle import ChainGroup, DraftShape, ShadowEvaluation
from specrouter.execution.shadow_evaluator import ShadowEvaluator
from specrouter.request.params import SamplingParams
from specrouter.routing import planner, shadow_policy
from tests.specrouter.execution.test_executor import PROMPTS, Bench, fail

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.7)
ALL_ROWS = np.arange(len(PROMPTS))


@pytest.fixture(scope="module")
def drafter(small_family: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(small_family["small"]))


def with_text(pool: ModelPool, params: SamplingParams = GREEDY, tokens: int = 20) -> Bench:
    """Rows with so many output tokens that nobody has drafted; `small` has run before."""
    bench = Bench(pool, params=params, chunk=128)
    bench.executor.states.prepare("small")
    for _ in range(tokens):
        bench.cycle(("target",))
    return bench


def evaluable(bench: Bench, drafter: str = "small") -> list[int]:
    found: list[int] = ShadowEvaluator(bench.runtime).evaluable(drafter, ALL_ROWS).tolist()
    return found


def evaluated(bench: Bench, row: int = 1, tokens: int = 12) -> tuple[float, float]:
    """Accepted first choices, and how many were judged, after an evaluation of `small`."""
    before = bench.made()
    assert not bench.run([], evaluation=ShadowEvaluation("small", row, tokens)).failures
    assert bench.made() == before
    (seen,) = bench.profiler.snapshot().trees.values()
    return seen.recent_accepted, seen.recent_trials


def first_choices(drafter: Any, bench: Bench, row: int, params: SamplingParams) -> list[int]:
    """What the drafter would have drafted before each output token of a row."""
    prompt, made = PROMPTS[row], bench.made()[row]
    with torch.inference_mode():
        logits = drafter(torch.tensor([prompt + made])).logits[0].double().numpy()
    choices = []
    for position in range(len(made)):
        scores = logits[len(prompt) + position - 1]
        if params.temperature:
            noise = gumbel(row, position, len(scores))  # rows are seeded with their numbers
            scores = scores / params.temperature + noise
        choices.append(int(scores.argmax()))
    return choices


@pytest.mark.parametrize("tokens", [4, 20])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_drafter_is_accepted_where_it_would_have_chosen_the_text(
    params: SamplingParams, tokens: int, pool: ModelPool, drafter: Any
) -> None:
    bench = with_text(pool, params)
    choices = first_choices(drafter, bench, 1, params)[-tokens:]
    said = bench.made()[1][-tokens:]
    agreed = sum(a == b for a, b in zip(choices, said, strict=True))
    assert evaluated(bench, tokens=tokens) == (agreed, tokens)


def test_nobody_is_evaluated_whose_choices_cannot_be_made_again(pool: ModelPool) -> None:
    reading = dataclasses.replace(SAMPLED, frequency_penalty=0.5)
    assert evaluable(with_text(pool, reading)) == [0, 0, 0]
    assert evaluable(with_text(pool, SAMPLED), "middle") == [0, 0, 0]  # it would have to be loaded


def test_a_drafter_that_fails_in_its_evaluation_costs_nobody_a_token(
    pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = with_text(pool, SAMPLED)
    before = bench.manager.counts.copy()
    fail(monkeypatch, "small")
    groups = [ChainGroup(chain=("target",), shape=DraftShape(1), rows=ALL_ROWS)]
    result = bench.run(groups, evaluation=ShadowEvaluation("small", 0, 8))
    assert [failure.model for failure in result.failures] == ["small"]
    assert (bench.manager.counts == before + 1).all()
    assert not bench.profiler.snapshot().trees


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_the_same_however_often_drafters_are_evaluated(
    params: SamplingParams, small_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_EVALUATE_EVERY", 1)
    monkeypatch.setattr(shadow_policy, "EXPLORED_SHARE", 1e9)
    monkeypatch.setattr(shadow_policy, "_HOPEFUL", 0.0)
    monkeypatch.setattr(shadow_policy, "_STALE_CYCLES", 0)
    monkeypatch.setattr(shadow_policy, "PRIOR", 1)
    each = [dataclasses.replace(params, seed=seed) for seed in range(len(PROMPTS))]
    with ChainRouter.from_config(copy.deepcopy(small_config)) as router:
        for name in ("small", "middle"):  # who never ran is not evaluated
            chain = Speculation(chain=(name, "target"))
            router.generate(PROMPTS, each, chain)
        plain = router.generate(PROMPTS, each, "off")
        before = router.instruments.statistics().shadow_evaluations
        routed = router.generate(PROMPTS, each)
        assert [output.token_ids for output in routed] == [output.token_ids for output in plain]
        assert router.instruments.statistics().shadow_evaluations > before + 3
