"""Who quotes drafts without the chain's models, and only where that promises more."""

from typing import Any

import pytest

from modelpool import ModelPool
from specrouter.cycle import Option
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


def test_only_as_a_chains_own_drafter_is_a_look_up_a_forward(pool: ModelPool) -> None:
    bench = DraftingBench(pool, left=LEFT, prompts=PROMPTS)
    forwards = bench.runtime.profiler.statistics
    bench.drafts(PAIR, whole=False, quotes="suffix", predicted=PLANNED)
    assert "suffix" not in forwards().forwards
    bench.draft(("suffix", "target"), quotes="suffix")
    assert forwards().forwards["suffix"] > 0


def test_a_look_up_that_fails_costs_nothing_but_itself(
    pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = DraftingBench(pool, left=LEFT, prompts=PROMPTS)

    def broken(*arguments: Any) -> None:
        raise RuntimeError("the table is broken")

    monkeypatch.setattr("processors.ngram.NgramDraftProcessor.draft", broken)
    draft = bench.draft(PAIR, whole=False, quotes="suffix", predicted=PLANNED)
    assert (draft.rows.tolist(), draft.used) == ([1, 2], ["small"])
    assert bench.runtime.faults.counts["drafting"] == 1
