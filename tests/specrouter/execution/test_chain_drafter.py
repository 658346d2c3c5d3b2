"""A chain drafts level after level; who fails is passed over, what is at hand is offered."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from modelpool import ModelPool
from specrouter.cycle import ChainGroup, CycleResult, DraftShape
from specrouter.execution.acceptance_feedback import AcceptanceFeedback
from specrouter.execution.chain_drafter import ChainDrafter
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.model_comparison import ModelComparison
from specrouter.request.params import MAX_TREE_TOKENS, Chain, SamplingParams
from tests.processors.trees import nodes_of, path
from tests.specrouter.execution.test_executor import PAIR, PROMPTS, TRIPLE, Bench, plan_of


class DraftingBench(Bench):
    """Of which nobody has read anything."""

    def __init__(
        self,
        pool: ModelPool,
        left: tuple[int, ...] = (9, 9, 9),
        prompts: Sequence[list[int]] = PROMPTS,
    ) -> None:
        params = [
            SamplingParams(max_new_tokens=new, ignore_eos=True, temperature=0.7 * (row != 1))
            for row, new in enumerate(left)
        ]
        super().__init__(pool, prompts=prompts, params=params, deepest=MAX_TREE_TOKENS)
        comparison = ModelComparison(self.runtime)
        feedback = AcceptanceFeedback(self.runtime, comparison)
        self._drafter = ChainDrafter(self.runtime, feedback, comparison)

    def forget(self, row: int) -> None:
        self._drafter.forget(row)

    def draft(self, chain: Chain, depth: int = 3, width: int = 1, **given: Any) -> GroupDraft:
        [draft] = self.drafts(chain, depth, width, **given)
        return draft

    def drafts(
        self, chain: Chain, depth: int = 3, width: int = 1, **given: Any
    ) -> list[GroupDraft]:
        group = ChainGroup(
            chain=chain, shape=DraftShape(depth, width), rows=np.arange(len(self.prompts)), **given
        )
        with torch.inference_mode(), self.runtime.states.cycle():
            return self._drafter.offered(plan_of([group]), CycleResult())


def paths(draft: GroupDraft) -> dict[int, list[tuple[int, ...]]]:
    assert draft.result is not None
    return {
        row: [path(nodes, place) for place in range(len(nodes))]
        for row, nodes in nodes_of(draft.result.tree).items()
    }


@pytest.mark.parametrize("width", [1, 3])
def test_the_first_member_drafts_trees_of_the_groups_shape(width: int, pool: ModelPool) -> None:
    draft = DraftingBench(pool).draft(PAIR, depth=3, width=width)
    assert draft.used == ["small"]
    assert draft.result is not None
    assert draft.result.tree.sizes.tolist() == [3 * width] * 3
    assert draft.result.tree.depths.max(axis=1).tolist() == [3] * 3
    assert draft.is_regular


def test_an_intermediate_adds_its_own_choice_to_every_path_that_it_follows(
    pool: ModelPool,
) -> None:
    first, second = DraftingBench(pool).draft(PAIR), DraftingBench(pool).draft(TRIPLE)
    assert second.used == ["small", "middle"]
    for row, drafted in paths(first).items():
        after = max(paths(second)[row], key=len)
        assert after[:-1] == () or after[:-1] in drafted


def test_a_chain_drafts_within_what_a_row_may_gain(pool: ModelPool) -> None:
    draft = DraftingBench(pool, left=(9, 1, 3)).draft(TRIPLE, depth=4)
    assert draft.rows.tolist() == [0, 2]  # a row's last token is the target's own
    assert draft.cut_rows.tolist() == [1, 2]
    assert all(len(text) <= 2 for text in paths(draft)[2])
