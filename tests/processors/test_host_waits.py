"""Drafting on an accelerator never waits for it before the tree is whole; each pass is one copy."""

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from modelpool.attention.backend import PATH
from modelpool.attention.kv_view import AttentionLayer, KVView
from modelpool.attention.path import PathLayout
from modelpool.fast.graph_runner import GraphRunner
from modelpool.fast.layer_reference import Arena, PackInputs
from modelpool.fast.pack_layout import Pack
from modelpool.fast.pack_sender import PackSender
from modelpool.forward import ForwardOutput, HiddenLayers
from processors.draft import DraftProcessor
from processors.drafts import DraftRequest
from processors.pack import ActiveModel
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings
from statemgr import StateManager
from tests.fake_cuda import CUDA, fake_cuda
from tests.kv_layers import kv_layer
from tests.modelpool.fast.passes import SlowMemory

VOCAB, DEPTH, LAYERS, KV_HEADS, DIM = 64, 4, 2, 2, 8


class TreeIsAskedFor(Exception):
    """Where the one wait of a draft is."""


class FakeModel:
    """Attends through the view as a model does; its logits are any."""

    name, device, vocab_size = "fake", CUDA, VOCAB

    def __init__(self) -> None:
        layer = kv_layer(CUDA, torch.float16, KV_HEADS, DIM)
        self.kv_layers, self.forwards = dict.fromkeys(range(LAYERS), layer), 0
        self.attention = PATH
        self.memory = SlowMemory()
        self._runner = GraphRunner(_compute, PackSender(self.memory))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        view: KVView,
        logit_index: Tensor,
        hidden: HiddenLayers = (),
    ) -> ForwardOutput:
        self.forwards += 1
        arenas = [view.arena(AttentionLayer(number, 1.0)) for number in range(LAYERS)]
        places = view.layout(PathLayout).places
        return self._runner(Pack(tokens, places, logit_index), arenas)


def _compute(inputs: PackInputs, arenas: Sequence[Arena], hidden: HiddenLayers) -> ForwardOutput:
    """Reads what a forward reads, on the device."""
    parts = inputs.tokens, inputs.slots, inputs.positions, inputs.paths.path, inputs.logit_index
    assert {part.device for part in parts} == {CUDA}
    x = _empty(VOCAB, DIM).index_select(0, inputs.tokens)
    return ForwardOutput(_empty(len(x), VOCAB).index_select(0, inputs.logit_index))


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device=CUDA)


SETTINGS = [
    SamplingSettings(),
    SamplingSettings(temperature=0.8, seed=3),
    SamplingSettings(temperature=0.7, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.2),
]


def opened(model: FakeModel, settings: list[SamplingSettings]) -> tuple[ActiveModel, Sampler]:
    manager, sampler = StateManager(rows=4, max_tokens=128), Sampler(VOCAB, window=16)
    for settings_of_row in settings:
        row = manager.allocate([3, 1, 4, 1], 64)
        assert row is not None
        sampler.open(row, settings_of_row, prompt=[3, 1, 4, 1])
    state = manager.open_state("fake", model.kv_layers)
    return ActiveModel(model, state, manager), sampler  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("settings", [SETTINGS[:1], SETTINGS[:2], SETTINGS], ids=len)
def test_the_first_wait_of_a_draft_is_for_the_whole_tree(
    settings: list[SamplingSettings], width: int
) -> None:
    rows = np.arange(len(settings))
    depths = np.full(len(rows), DEPTH)
    depths[-1] -= len(rows) > 1  # rows end at different depths
    request = DraftRequest(
        rows=rows, output_positions=np.zeros_like(rows), depths=depths, width=width
    )
    model = FakeModel()
    with fake_cuda(), mock.patch("processors.beam.Beam.tree", side_effect=TreeIsAskedFor):
        active, sampler = opened(model, settings)
        with pytest.raises(TreeIsAskedFor):
            DraftProcessor(sampler).draft(active, request)
    assert model.forwards == DEPTH
    assert model.memory.copies == DEPTH
    assert model.memory.waits == 0


@pytest.mark.parametrize("width", [1, 3])
def test_a_pass_is_one_copy_and_nothing_else_is_copied(width: int) -> None:
    """Of requests that are greedy: noise and limits of others are the sampler's."""
    rows = np.arange(3)
    request = DraftRequest(
        rows=rows, output_positions=np.zeros_like(rows), depths=np.full(3, DEPTH), width=width
    )
    model, copies = FakeModel(), list[int]()
    with fake_cuda() as device:

        def ask(beam: object) -> None:
            copies.append(device.copies)
            raise TreeIsAskedFor

        active, sampler = opened(model, [SamplingSettings()] * 3)
        copies.append(device.copies)
        drafter = DraftProcessor(sampler)
        with mock.patch("processors.beam.Beam.tree", ask), pytest.raises(TreeIsAskedFor):
            drafter.draft(active, request)
    assert model.memory.copies == DEPTH
    assert copies[0] == copies[1]
