"""Drafters read at most a chunk a cycle of what they lack, and no text depends on when."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelpool import ModelPool
from processors import ActiveModel, PrefillProcessor
from specrouter.cycle import LEAST_CHUNK, ChainGroup, CycleResult, DraftShape
from specrouter.execution.model_comparison import ModelComparison
from specrouter.execution.model_states import ModelStates
from specrouter.request.params import Chain, SamplingParams
from tests.specrouter.execution.test_executor import PAIR, TRIPLE, Bench

ALONE: Chain = ("target",)
LONG = [(7 * place) % 310 + 3 for place in range(81)]
SHORT = [[5, 17, 30], [3, 4], [25, 1, 99]]
SAMPLED = SamplingParams(max_new_tokens=90, ignore_eos=True, temperature=0.8, seed=1)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Counter[str]]]:
    """Tokens by model that were read of what it lacked, cycle by cycle."""
    cycles: list[Counter[str]] = []
    real_feed, real_begin = PrefillProcessor.feed, ModelStates.begin

    def begin(states: ModelStates) -> None:
        cycles.append(Counter())
        real_begin(states)

    def feed(prefill: Any, active: ActiveModel, rows: Any, counts: Any, *rest: Any) -> Any:
        cycles[-1][active.model.name] += int(counts.sum())
        return real_feed(prefill, active, rows, counts, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(PrefillProcessor, "feed", feed)
        patch.setattr(ModelStates, "begin", begin)
        yield cycles


def drafters(result: CycleResult) -> set[int]:
    """Rows that were drafted for."""
    return {commit.row for commit in result.commits if len(commit.chain) > 1}


def read_prompts(bench: Bench) -> None:
    """The target does; nobody has drafted yet."""
    bench.cycle(ALONE)


@given(data=st.data(), chunk=st.integers(1, 30))
@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_model_reads_more_than_a_chunk_a_cycle_and_texts_are_the_targets(
    data: st.DataObject, chunk: int, pool: ModelPool, read: list[Counter[str]]
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    prompts = [LONG[:length] for length in lengths]
    bench = Bench(pool, prompts=prompts, params=SAMPLED, chunk=chunk)
    chains = st.sampled_from([ALONE, PAIR, TRIPLE, ("middle", "target")])
    read.clear()
    for _ in range(6):
        groups: dict[Chain, list[int]] = {}
        for row in range(len(prompts)):
            groups.setdefault(data.draw(chains), []).append(row)
        asked = [
            ChainGroup(chain=chain, shape=DraftShape(2, 2), rows=np.array(rows))
            for chain, rows in groups.items()
        ]
        result = bench.run(asked)
        assert sorted(commit.row for commit in result.commits) == list(range(len(prompts)))
        assert not result.failures
        assert not result.behind_rows & drafters(result)
    most = max(chunk, LEAST_CHUNK)
    assert all(tokens <= most for cycle in read for tokens in cycle.values())
    bench.assert_alone()


@pytest.mark.parametrize("chain", [PAIR, TRIPLE], ids=">".join)
def test_others_draft_in_each_cycle_while_a_prompt_of_20_chunks_is_read(
    chain: Chain, pool: ModelPool, read: list[Counter[str]]
) -> None:
    bench = Bench(pool, prompts=[LONG, *SHORT], params=SAMPLED, chunk=4)
    read_prompts(bench)
    for _ in range(2):  # short prompts come first, though they are in later rows
        bench.cycle(chain)
    read.clear()
    cycles = 0
    while (result := bench.cycle(chain, depth=1)).behind_rows:
        assert result.behind_rows == {0}
        assert {commit.row for commit in result.commits} == {0, 1, 2, 3}
        assert drafters(result) == {1, 2, 3}
        assert result.caught_up
        cycles += 1
    assert drafters(result) == {0, 1, 2, 3}
    assert all(cycle[name] <= 4 for cycle in read for name in chain)
    # The text grows by one token a cycle meanwhile; the last few are read in passing.
    assert len(LONG) // 4 < cycles < len(LONG) // 3 + 3
    bench.assert_alone()


def test_what_is_evicted_in_the_midst_of_a_cycle_is_passed_over_without_blame(
    pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(pool, prompts=[LONG[:20], *SHORT], params=SAMPLED)
    for _ in range(3):
        bench.cycle(PAIR)
    real = ModelStates.stage

    def stage(states: ModelStates, name: str, rows: Any) -> Any:
        if name == "small":
            assert pool.evict("small")
            states.forget_evicted()
        return real(states, name, rows)

    with monkeypatch.context() as patch:
        patch.setattr(ModelStates, "stage", stage)
        result = bench.cycle(PAIR)
    assert not result.failures
    assert not result.is_regular
    assert not drafters(result)
    assert len(result.commits) == 4
    assert bench.cycle(PAIR).caught_up
    bench.assert_alone()


@pytest.mark.parametrize("chunk", [1, 2, 5, 11, 16])
def test_models_are_compared_at_the_same_places_of_prompts_however_these_are_read(
    chunk: int, pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[Tensor, Tensor]] = []

    def note(ours: Tensor, theirs: Tensor) -> float:
        compared.append((ours, theirs))
        return 0.5

    def at_prompts_end(chunk: int) -> list[Tensor]:
        """The drafter's logits and the target's."""
        compared.clear()
        bench = Bench(pool, prompts=[LONG[:23]], params=SAMPLED, chunk=chunk)
        read_prompts(bench)
        for _ in range(4):
            bench.cycle(ALONE)  # the text has gone on beyond the prompt's end
        with monkeypatch.context() as patch:
            patch.setattr("specrouter.execution.model_comparison.total_variation", note)
            patch.setattr(ModelComparison, "compare", lambda *_: None)  # of verified trees
            while bench.cycle(PAIR).behind_rows:
                pass
        return [torch.cat(each) for each in zip(*compared, strict=True)]

    whole, parts = at_prompts_end(128), at_prompts_end(chunk)
    assert len(whole[0]) == 3
    torch.testing.assert_close(parts, whole)
