"""Who quotes drafts without the chain's models, and only where that promises more."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool import ModelPool
from specrouter.cycle import Option
from specrouter.execution.quotations import _productive
from tests.specrouter.execution.test_chain_drafter import DraftingBench, paths
from tests.specrouter.execution.test_executor import PAIR

PHRASE = list(range(20, 60))
QUOTING = [*PHRASE, 7, *PHRASE[:20]]
PROMPTS = [QUOTING, [3, 4, 9], [250, 1, 99]]
LEFT = (21, 21, 21)  # the text goes on for 20 tokens before it repeats itself
PLANNED = Option(chain=PAIR, tokens=3.0)


@pytest.fixture(scope="module")
def pool(small_config: dict[str, Any]) -> ModelPool:
    pool = small_config["pool"]
    models = [*pool["models"], {"name": "suffix", "source": "suffix"}]
    return ModelPool.from_config({**pool, "models": models})


def test_a_row_that_quotes_drafts_by_itself_and_the_others_by_the_chain(pool: ModelPool) -> None:
    bench = DraftingBench(pool, left=LEFT, prompts=PROMPTS)
    quoted, rest = bench.drafts(PAIR, whole=False, quotes="suffix", predicted=PLANNED)
    assert (quoted.rows.tolist(), quoted.used) == ([0], ["suffix"])
    assert max(map(len, paths(quoted)[0])) == 20
    assert max(paths(quoted)[0], key=len) == tuple(PHRASE[20:])
    assert quoted.is_quoted
    assert (rest.rows.tolist(), rest.used, rest.is_quoted) == ([1, 2], ["small"], False)
    assert bench.runtime.states.lag("small", rest.rows).max() <= 2


@pytest.mark.parametrize(
    "given",
    [
        {"predicted": Option(chain=PAIR, tokens=60.0), "quotes": "suffix"},
        {"predicted": PLANNED},
        {"quotes": "suffix"},
    ],
    ids=["the chain promises more", "it may not", "nobody knows what the chain promises"],
)
def test_otherwise_the_chain_drafts(given: dict[str, Any], pool: ModelPool) -> None:
    draft = DraftingBench(pool, left=LEFT, prompts=PROMPTS).draft(PAIR, whole=False, **given)
    assert draft.used == ["small"]
    assert draft.behind_rows.tolist() == [0], "its prompt is longer than a chunk"


def test_a_quotation_is_no_forward(pool: ModelPool) -> None:
    bench = DraftingBench(pool, left=LEFT, prompts=PROMPTS)
    forwards = bench.runtime.profiler.statistics
    bench.drafts(PAIR, whole=False, quotes="suffix", predicted=PLANNED)
    assert "suffix" not in forwards().forwards
    bench.draft(("suffix", "target"))
    assert forwards().forwards["suffix"] > 0


ALONE = Option(chain=("target",))


@pytest.mark.parametrize(("node_ms", "most"), [(0.001, 20), (0.9, 12), (9.0, 0)])
def test_where_nobody_else_drafts_as_many_tokens_are_verified_as_pay(
    node_ms: float, most: int, pool: ModelPool
) -> None:
    bench = DraftingBench(pool, left=LEFT, prompts=PROMPTS)
    ms = 3.0 + node_ms * np.arange(65.0)
    drafts = bench.drafts(
        ("target",), quotes="suffix", predicted=ALONE, quoted_ms=ms, requests=3, whole=False
    )
    quoted = [draft for draft in drafts if draft.is_quoted]
    lengths = [len(path) for draft in quoted for path in paths(draft)[0]]
    if not most:
        assert not quoted
    else:
        assert quoted[0].rows.tolist() == [0]
        assert not quoted[0].group.leaves_choice, "it has been decided"
        assert 0 < max(lengths) <= most


@given(
    st.lists(st.lists(st.floats(0.05, 1.0), max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0.01, 2.0), min_size=9, max_size=9),
)
def test_the_number_of_tokens_is_the_best_of_all(
    shares: list[list[float]], steps: list[float]
) -> None:
    worths = [np.cumprod(path).tolist() for path in shares]
    ms, requests = 1.0 + np.append(0.0, np.cumsum(steps)), len(worths) + 1

    def rate(counts: tuple[int, ...]) -> float:
        gained = sum(sum(path[:count]) for path, count in zip(worths, counts, strict=True))
        return float((requests + gained) / ms[sum(counts)])

    every = itertools.product(*(range(len(path) + 1) for path in worths))
    found = tuple(_productive(worths, ms, requests))
    assert rate(found) == pytest.approx(max(map(rate, every)))


def test_what_nobody_verified_is_learned_from_the_next_tokens(pool: ModelPool) -> None:
    bench = DraftingBench(pool, left=LEFT, prompts=PROMPTS)
    key = (("suffix",), "target", True)
    before = bench.runtime.profiler.path_worth(key, [0.9])
    for step in range(17):
        quoted, _ = bench.drafts(PAIR, whole=False, quotes="suffix", predicted=PLANNED)
        assert quoted.result is not None
        if step < 16:
            bench.runtime.manager.extend(0, quoted.result.tree.tokens[0, :1])
    trees = bench.runtime.profiler.snapshot().trees
    assert (trees[key].trials, trees[key].alpha) == (16.0, 1.0)
    assert bench.runtime.profiler.path_worth(key, [0.9]) > before


def test_where_nothing_pays_a_row_is_looked_for_less_often_until_it_ends(
    pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = DraftingBench(pool, left=LEFT, prompts=PROMPTS)
    looks, quote = list[int](), bench.runtime.drafters["suffix"].quote

    def counted(row: int, *asked: Any) -> Any:
        looks.append(row)
        return quote(row, *asked)

    monkeypatch.setattr(bench.runtime.drafters["suffix"], "quote", counted)
    dear: dict[str, Any] = {
        "predicted": ALONE,
        "quoted_ms": 3.0 + 9.0 * np.arange(65.0),
        "requests": 3,
    }
    for _ in range(11):
        bench.drafts(("target",), quotes="suffix", whole=False, **dear)
    assert looks.count(0) == 3 + 4, "in each of 3 cycles, then in every second one"
    bench.forget(0)
    looks.clear()
    for _ in range(3):
        bench.drafts(("target",), quotes="suffix", whole=False, **dear)
    assert (looks.count(0), looks.count(1)) == (3, 1)


def test_a_look_up_that_fails_costs_nothing_but_itself(
    pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = DraftingBench(pool, left=LEFT, prompts=PROMPTS)

    def broken(*arguments: Any) -> None:
        raise RuntimeError("the table is broken")

    monkeypatch.setattr("processors.ngram.NgramDraftProcessor.path", broken)
    draft = bench.draft(PAIR, whole=False, quotes="suffix", predicted=PLANNED)
    assert (draft.rows.tolist(), draft.used) == ([1, 2], ["small"])
    assert bench.runtime.faults.counts["drafting"] == 1
