"""Hidden states of every forward are those of transformers, for texts, packs and trees."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from modelpool.fast.cuda_forward import CudaForward
from modelpool.forward import HiddenLayers
from modelpool.packed_model import PackedModel
from test_support.llama_models import (
    LLAMA_SHAPED,
    OTHERS,
    PACKS,
    TREE_LINES,
    VOCAB,
    Feeder,
    make_model,
    read_tree,
    reference_kernels,
)
from tests.modelpool.fast.test_forwards import WAYS, assert_says
from tests.modelpool.fast.test_graph_runner import FakeGraphs

WANTED: Sequence[HiddenLayers] = ((), (0,), (1, 2), (3,), (0, 1, 2, 3))  # of three layers
FAMILIES = ["llama", "llama-tied", "llama-biased", "mistral", "qwen2-windows", "qwen3"]


def states_of(ordinary: PreTrainedModel, tokens: Tensor, layers: HiddenLayers) -> Tensor:
    """[B, T, layers, hidden_size] that transformers gives."""
    with torch.inference_mode():
        given = ordinary(tokens, output_hidden_states=True, use_cache=False).hidden_states
    return torch.stack([given[layer] for layer in layers], dim=2)


@pytest.mark.parametrize("name", [*FAMILIES, "gpt2", "opt", "phi"])
def test_hidden_states_of_a_pack_are_those_of_the_ordinary_forward(name: str) -> None:
    """Of prompts in chunks, of steps, and of rows beside others."""
    config = {**LLAMA_SHAPED, **OTHERS}[name]
    ordinary, layers = make_model(config()), (0, 1, config().num_hidden_layers)
    packed = PackedModel.wrap("m", make_model(config()), VOCAB)
    feeder = Feeder(packed.forward, packed)
    wanted = states_of(ordinary, feeder.texts, layers)
    for counts in PACKS:
        before = dict(feeder.fed)
        got = feeder.read(counts, [0], layers).hidden
        rows = [wanted[row, before[row] : before[row] + counts[row]] for row in sorted(counts)]
        torch.testing.assert_close(got, torch.cat(rows), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        *((way, torch.float64) for way in WAYS),
        *(("direct", dtype) for dtype in (torch.float32, torch.bfloat16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FAMILIES)
def test_short_ways_give_the_hidden_states_of_the_packed_forward(
    name: str, way: str, dtype: torch.dtype
) -> None:
    """To the bit where logits are; and these are what they are without hidden states."""
    one = WAYS[way]
    packed, forward = one.through(name, dtype)
    feeders = Feeder(packed.forward, packed), Feeder(forward, packed)
    alone = Feeder(forward, packed)
    for counts, layers in zip(PACKS, WANTED, strict=True):
        index = list(range(sum(counts.values())))[1::2]
        expected, got = (feeder.read(counts, index, layers) for feeder in feeders)
        assert_says(got.logits, alone.feed(counts, index), min(1e-9, one.tolerance[dtype]))
        if not layers:
            assert got.hidden is expected.hidden is None
            continue
        assert got.hidden is not None
        assert expected.hidden is not None
        assert_says(got.hidden, expected.hidden, one.tolerance[dtype])


@pytest.mark.parametrize("way", ["packed", *WAYS])
def test_a_node_of_a_tree_has_the_hidden_states_of_its_path_as_a_text(way: str) -> None:
    layers = (0, 2, 3)
    one = WAYS["lean" if way == "packed" else way]
    packed, short = one.through("qwen3", torch.float64)
    forward = packed.forward if way == "packed" else short
    got = read_tree(forward, packed, layers).hidden
    assert got is not None
    tokens = torch.arange(len(got)) + 5
    for index, states in enumerate(got):
        row, node = divmod(index, len(TREE_LINES))
        path = tokens[[row * len(TREE_LINES) + step for step in TREE_LINES[node]]]
        text = torch.cat((Feeder(forward, packed).texts[row, :7], path))
        wanted = states_of(make_model(LLAMA_SHAPED["qwen3"]()), text[None], layers)[0, -1]
        torch.testing.assert_close(states, wanted, rtol=0, atol=1e-4)


def test_graphs_give_hidden_states_and_logits_apart_from_those_without() -> None:
    packed = PackedModel.wrap("m", make_model(LLAMA_SHAPED["llama"](), torch.float64), VOCAB)
    graphs, steps = FakeGraphs(), ((), (1, 3), (), (1, 3), (2,))
    eager, graphed = (
        Feeder(CudaForward(packed, reference_kernels(), maker), packed) for maker in (None, graphs)
    )
    given = [
        [feeder.read({0: 3, 1: 2}, None, layers) for feeder in (eager, graphed)] for layers in steps
    ]
    for wanted, got in given:  # none was overwritten by a later one
        torch.testing.assert_close(got.logits, wanted.logits, rtol=0, atol=1e-9)
        torch.testing.assert_close(got.hidden, wanted.hidden, rtol=0, atol=1e-9)
    assert (graphs.captured, graphs.replayed) == (3, 5)
