"""Graphs of a stand-in, which runs the captured function again on what stands in its inputs."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import pytest
import torch

from modelpool.fast.cuda_forward import CudaForward
from modelpool.fast.graph_runner import SIZES, Compute, GraphRunner, size_of
from modelpool.fast.layer_reference import Arena, PackInputs
from modelpool.fast.pack_sender import HostMemory, PackSender
from modelpool.forward import ForwardOutput, HiddenLayers
from modelpool.packed_model import PackedModel
from test_support.llama_models import (
    LLAMA_SHAPED,
    VOCAB,
    Feeder,
    feed_tree,
    make_model,
    reference_kernels,
)
from tests.modelpool.fast.passes import BLOCK, pack_of


class FakeGraphs:
    """As CUDA's: the result of a replay stands where that of the capture stood."""

    def __init__(self, fails: bool = False) -> None:
        self.captured = self.replayed = 0
        self._fails = fails

    def capture(self, run: Callable[[], ForwardOutput]) -> tuple[Callable[[], None], ForwardOutput]:
        if self._fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        result = run()

        def replay() -> None:
            self.replayed += 1
            again = run()
            result.logits.copy_(again.logits)
            if result.hidden is not None and again.hidden is not None:
                result.hidden.copy_(again.hidden)

        return replay, result


class Echo:
    """A forward whose logits say what it was given, and which writes as one does."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.arenas: list[Arena] = [(torch.zeros(2000, 1, 1), torch.zeros(2000, 1, 1))]

    def __call__(
        self, inputs: PackInputs, arenas: Sequence[Arena], hidden: HiddenLayers
    ) -> ForwardOutput:
        self.sizes.append(len(inputs.tokens))
        keys, _ = arenas[0]
        keys.index_copy_(0, inputs.slots.long(), inputs.tokens.float().view(-1, 1, 1))
        logits = inputs.tokens.index_select(0, inputs.logit_index).unsqueeze(1)
        states = [100 * index + inputs.tokens for index in hidden]
        return ForwardOutput(logits, torch.stack(states, dim=1) if states else None)


def runner(compute: Compute, graphs: FakeGraphs | None) -> GraphRunner:
    return GraphRunner(compute, PackSender(HostMemory(torch.device("cpu"))), graphs)


@pytest.mark.parametrize("tokens", [1, 3, 17, 100, 1024])
def test_a_pack_is_filled_up_to_the_next_size_and_answers_for_itself_alone(tokens: int) -> None:
    echo, graphs = Echo(), FakeGraphs()
    run = runner(echo, graphs)
    logits = run(pack_of(tokens), echo.arenas).logits
    assert logits[:, 0].tolist() == list(range(5, 5 + tokens))
    assert set(echo.sizes) == {min(size for size in SIZES if size >= tokens)}
    written = echo.arenas[0][0].flatten()
    assert written[:tokens].tolist() == list(range(5, 5 + tokens))
    assert not written[tokens:].any()


def test_packs_of_one_size_share_a_graph_and_do_not_overwrite_results() -> None:
    echo, graphs = Echo(), FakeGraphs()
    run = runner(echo, graphs)
    first = run(pack_of(6), echo.arenas).logits
    other = pack_of(7)
    moved = dataclasses.replace(other, tokens=other.tokens + 100)
    second = run(moved, echo.arenas).logits
    assert (graphs.captured, graphs.replayed) == (1, 2)
    assert first[:, 0].tolist() == list(range(5, 11))
    assert second[:, 0].tolist() == list(range(105, 112))


def test_prompts_and_large_packs_run_eagerly() -> None:
    echo, graphs = Echo(), FakeGraphs()
    run = runner(echo, graphs)
    for asked in (pack_of(64, logits=1), pack_of(1025), pack_of(0)):
        assert size_of(asked) is None
        assert len(run(asked, echo.arenas).logits) == len(asked.logit_index)
    assert graphs.captured == 0


def test_sizes_are_told_as_long_as_packs_are_filled_up() -> None:
    echo = Echo()
    assert runner(echo, None).sizes == ()
    run = runner(echo, FakeGraphs(fails=True))
    assert len(run.sizes) == len(SIZES)
    run(pack_of(3), echo.arenas)
    assert len(run.sizes) == 0


def test_another_arena_has_no_graphs_yet_and_two_keep_theirs() -> None:
    echo, graphs = Echo(), FakeGraphs()
    run = runner(echo, graphs)
    arenas = [Echo().arenas for _ in range(3)]
    for number, captured in ((0, 1), (1, 2), (0, 2), (1, 2), (2, 3), (0, 4)):
        run(pack_of(4), arenas[number])
        assert graphs.captured == captured
        keys = arenas[number][0][0].flatten()
        assert keys[:4].tolist() == [5, 6, 7, 8]
        keys.zero_()


def test_what_most_packs_need_is_captured_before_there_are_any() -> None:
    echo, graphs = Echo(), FakeGraphs()
    run = runner(echo, graphs)
    run.prepare(echo.arenas, BLOCK, (1,))
    captured = graphs.captured
    assert captured == sum(size <= 256 for size in SIZES)
    assert not any(part.any() for part in echo.arenas[0])
    for tokens in range(1, 257, 17):
        found = run(
            dataclasses.replace(pack_of(tokens, path=tokens % 21 + 1), hidden=(1,)), echo.arenas
        )
        assert found.logits[:, 0].tolist() == list(range(5, 5 + tokens))
        assert found.hidden is not None
        assert found.hidden[:, 0].tolist() == list(range(105, 105 + tokens))
    assert graphs.captured == captured


def test_where_capture_fails_packs_run_eagerly_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    echo, graphs = Echo(), FakeGraphs(fails=True)
    run = runner(echo, graphs)
    with caplog.at_level(logging.WARNING):
        for tokens in (3, 5, 3):
            logits = run(pack_of(tokens), echo.arenas).logits
            assert logits[:, 0].tolist() == list(range(5, 5 + tokens))
    assert len(caplog.records) == 1
    assert "eagerly" in caplog.text


@pytest.mark.parametrize("name", ["llama", "qwen2-windows"])
def test_a_model_as_graphs_says_what_it_says_eagerly(name: str) -> None:
    """Packs that shrink and grow, and a tree: nothing of an earlier pack is left in the inputs."""
    packed = PackedModel.wrap("m", make_model(LLAMA_SHAPED[name](), torch.float64), VOCAB)
    graphs = FakeGraphs()
    eager, graphed = (CudaForward(packed, reference_kernels(), maker) for maker in (None, graphs))
    feeders = Feeder(eager, packed), Feeder(graphed, packed)
    for counts in ({0: 6, 1: 6}, {0: 1, 1: 1, 2: 5}, {0: 1, 1: 1, 2: 3}, {0: 2, 3: 4}):
        wanted, got = (feeder.feed(counts) for feeder in feeders)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)
    wanted, got = (feed_tree(one, packed) for one in (eager, graphed))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)
    assert graphs.replayed > graphs.captured > 1
