"""The direct forward has the bits of the model's own, or there is none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from modelpool.fast.direct_forward import DirectForward, direct_forward_of
from modelpool.fast.tuning import Tuning
from modelpool.packed_model import PackedModel
from tests.modelpool.llama_models import (
    CHANGES,
    LLAMA_SHAPED,
    OTHERS,
    VOCAB,
    Feeder,
    feed_tree,
    make_model,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def wrap(name: str, dtype: torch.dtype = torch.float32) -> tuple[PackedModel, DirectForward]:
    model = make_model(LLAMA_SHAPED[name](), dtype)
    packed = PackedModel.wrap("m", model, VOCAB, Tuning(pack_weights=True))
    direct = direct_forward_of(packed)
    assert direct is not None
    return packed, direct


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", LLAMA_SHAPED)
def test_packs_and_trees_give_the_bits_of_the_packed_forward(name: str, dtype: torch.dtype) -> None:
    packed, direct = wrap(name, dtype)
    feeders = Feeder(packed.forward, packed), Feeder(direct, packed)
    # One group as it stands; one with idle places; one with an idle row; a long row alone.
    for counts in (
        dict.fromkeys(range(4), 6),
        {0: 1, 1: 4, 2: 1, 3: 2},
        {0: 2, 2: 2},
        {0: 3, 1: 20},
        {3: 1},
    ):
        expected, got = (feeder.feed(counts) for feeder in feeders)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    assert torch.equal(feed_tree(direct, packed), feed_tree(packed.forward, packed))


@pytest.mark.parametrize("wanted", [[], [7], [9, 2]])
def test_only_the_wanted_logits_are_computed(wanted: list[int]) -> None:
    packed, direct = wrap("llama-tied")
    expected, got = (
        Feeder(forward, packed).feed({0: 6, 2: 6}, wanted) for forward in (packed.forward, direct)
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_have_none(name: str) -> None:
    try:
        packed = PackedModel.wrap("m", make_model(OTHERS[name]()), VOCAB)
    except ValueError:  # not for a pool at all
        return
    assert direct_forward_of(packed) is None


@pytest.mark.parametrize("change", CHANGES)
def test_changed_modules_have_none(change: Callable[[Any], None]) -> None:
    packed, _ = wrap("llama", torch.float64)
    change(packed.model)
    assert direct_forward_of(packed) is None


def test_a_forward_with_one_other_bit_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = wrap("qwen3")
    plain = DirectForward.__call__

    def nearly(self: DirectForward, *pack: Any) -> torch.Tensor:
        logits = plain(self, *pack)
        logits[0, 3] = torch.nextafter(logits[0, 3], torch.tensor(torch.inf))
        return logits

    monkeypatch.setattr(DirectForward, "__call__", nearly)
    assert direct_forward_of(packed) is None


def test_windows_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = wrap("mistral")
    monkeypatch.setattr("modelpool.fast.direct_forward.attention_window", lambda *_: 6)
    assert direct_forward_of(packed) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_norms_in_one_call_have_the_bits_of_those_spelled_out(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, direct = wrap("qwen3", dtype)
    monkeypatch.setattr("modelpool.fast.direct_forward._is_one_call", lambda size: False)
    spelled = DirectForward(packed)
    expected, got = (Feeder(one, packed).feed({0: 6, 1: 1}) for one in (direct, spelled))
    assert torch.equal(got, expected)
