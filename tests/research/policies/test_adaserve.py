"""AdaServe's shapes, with its published settings worked by hand."""

import pytest

from specrouter.config import TreesConfig
from specrouter.request.params import MAX_DEPTH, MAX_TREE_TOKENS
from specrouter.slo.tree_shape import SPECINFER_TREE, adaserve_shape

LLAMA = TreesConfig(drafter_tokens=96, max_depth=8, min_depth=4, max_width=3)
QWEN = TreesConfig(drafter_tokens=80, max_depth=5, min_depth=3, max_width=3)


@pytest.mark.parametrize(
    ("requests", "shape"),
    [
        (1, (8, 3)),  # 511 and 96, both clipped
        (32, (8, 3)),  # 15 and 3
        (33, (8, 2)),  # 96 / 33 = 2.9
        (48, (8, 2)),  # 9 and 2
        (49, (8, 1)),  # 96 / 49 = 1.96
        (56, (8, 1)),  # 512 / 56 = 9.1
        (57, (7, 1)),  # 512 / 57 = 8.98
        (64, (7, 1)),  # 8 - 1, the published number of requests
        (102, (4, 1)),  # 512 / 102 = 5.02
        (1000, (4, 1)),  # -1 and 0, both clipped
    ],
)
def test_llama_with_the_published_settings(requests: int, shape: tuple[int, int]) -> None:
    assert adaserve_shape(requests, 512, LLAMA) == shape


@pytest.mark.parametrize(
    ("requests", "shape"),
    [
        (1, (5, 3)),
        (26, (5, 3)),  # 9.8 - 1 and 3.08
        (27, (5, 2)),  # 80 / 27 = 2.96
        (42, (5, 1)),  # 256 / 42 = 6.1 and 80 / 42 = 1.9
        (43, (4, 1)),  # 256 / 43 = 5.95
        (52, (3, 1)),  # 256 / 52 = 4.9
        (80, (3, 1)),  # 3 - 1, clipped; 1: the published number of requests
    ],
)
def test_qwen_with_the_published_settings(requests: int, shape: tuple[int, int]) -> None:
    assert adaserve_shape(requests, 256, QWEN) == shape


def test_c1_counts_as_requests_and_c2_as_branches() -> None:
    shifted = LLAMA.model_copy(update={"c1": 9, "c2": 1})
    assert adaserve_shape(56, 512, shifted) == (6, 2)  # 512 // 65 - 1 and 96 // 56 + 1
    narrow = LLAMA.model_copy(update={"c2": -9})
    assert adaserve_shape(56, 512, narrow) == (8, 1)


def test_more_requests_never_get_larger_trees() -> None:
    for budget_tokens, bounds in ((512, LLAMA), (256, QWEN)):
        shapes = [adaserve_shape(n, budget_tokens, bounds) for n in range(1, 600)]
        depths, widths = zip(*shapes, strict=True)
        assert list(depths) == sorted(depths, reverse=True)
        assert list(widths) == sorted(widths, reverse=True)


def test_while_nothing_is_clipped_a_path_and_its_root_fit_the_mean_budget() -> None:
    loose = TreesConfig(max_depth=MAX_DEPTH, min_depth=1)
    for n in range(1, 257):
        assert n * (adaserve_shape(n, 512, loose)[0] + 1) <= 512


def test_the_static_tree_branches_once() -> None:
    level, nodes = 1, 0
    for branches in SPECINFER_TREE:
        level *= branches
        nodes += level
    assert (len(SPECINFER_TREE), level, nodes) == (8, 3, 20)
    assert nodes <= MAX_TREE_TOKENS
