"""Passes are copied at once, and none overwrites one that is still being copied."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelpool.attention.path import PackPlaces
from modelpool.fast.layer_reference import PackInputs
from modelpool.fast.pack_layout import Pack, PackLayout, buffer_on
from modelpool.fast.pack_sender import HostMemory, PackSender
from tests.modelpool.fast.passes import SlowMemory, pack_of

CPU = torch.device("cpu")
TABLES = np.zeros((1, 1), np.int32)


def numbered(tokens: int, first: int) -> Pack:
    places = np.full((4, tokens), first, dtype=np.int32)
    return Pack(
        torch.arange(first, first + tokens),
        PackPlaces(places, TABLES, 16, None, 9),
        torch.arange(tokens),
    )


def send(sender: PackSender, pack: Pack) -> PackInputs:
    layout = PackLayout.of(pack)
    return sender.send(layout, pack, buffer_on(CPU, layout), 9)


@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 4)), min_size=1, max_size=60))
def test_each_pass_arrives_as_it_was_written_whenever_its_copy_ends(
    passes: list[tuple[int, int]],
) -> None:
    """After each pass the device ends some of the copies; what a copy brings stands then."""
    memory = SlowMemory()
    sender, sent = PackSender(memory), list[tuple[Pack, PackInputs]]()
    for number, (tokens, ended) in enumerate(passes):
        pack = numbered(tokens, 1000 * number)
        sent.append((pack, send(sender, pack)))
        for _ in range(min(ended, len(memory.pending))):
            memory.end_one()
    memory.end_all()
    for pack, inputs in sent:
        assert inputs.tokens.tolist() == pack.tokens.tolist()
        assert inputs.slots.tolist() == pack.places.numbers[0].tolist()
    assert memory.copies == len(passes)


def test_the_host_goes_on_while_copies_are_in_flight_and_buffers_are_used_again() -> None:
    memory = SlowMemory()
    sender = PackSender(memory)
    for number in range(20):  # a draft's steps, none of which has ended
        send(sender, numbered(4, number))
    assert (memory.waits, memory.made) == (0, 20)
    memory.end_all()
    for number in range(20):
        send(sender, numbered(4, number))
        memory.end_one()
    assert (memory.waits, memory.made) == (0, 20)


def test_what_fails_on_the_way_leaves_the_buffer_to_others() -> None:
    memory = SlowMemory()
    sender = PackSender(memory)
    places = PackPlaces(np.zeros((4, 5), np.int32), TABLES, 16, None, 9)
    broken = Pack(torch.arange(3), places, torch.arange(3))
    for _ in range(40):
        with pytest.raises(ValueError, match="broadcast"):
            send(sender, broken)
    send(sender, pack_of(3))
    assert (memory.waits, memory.made, memory.copies) == (0, 1, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_passes_arrive_whatever_the_device_has_to_do() -> None:
    device = torch.device("cuda")
    sender, arrived = PackSender(HostMemory(device)), list[Tensor]()
    busy = torch.randn(4096, 4096, device=device)
    packs = [numbered(64, 1000 * number) for number in range(100)]
    for pack in packs:
        busy = busy @ busy
        layout = PackLayout.of(pack)
        arrived.append(sender.send(layout, pack, buffer_on(device, layout), 9).tokens)
    for pack, tokens in zip(packs, arrived, strict=True):
        assert tokens.tolist() == pack.tokens.tolist()
