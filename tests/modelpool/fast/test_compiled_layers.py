"""A pass in the C library computes what torch's operators do, and each token by itself."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modelpool.fast import lean_forward
from modelpool.fast.cpu import cpu_threads
from modelpool.fast.direct_forward import direct_forward_of
from modelpool.fast.lean_forward import LeanForward, lean_forward_of
from modelpool.fast.panels import exact_kernels
from modelpool.forward import ForwardOutput, HiddenLayers
from modelpool.packed_model import PackedModel
from modelpool.probe import ProbeView
from test_support.llama_models import (
    LLAMA_SHAPED,
    SHAPE,
    VOCAB,
    make_model,
    shaped,
)

ODD = {**SHAPE, "hidden_size": 44, "intermediate_size": 53, "num_hidden_layers": 1, "head_dim": 6}
LAYERS = SHAPE["num_hidden_layers"]
pytestmark = pytest.mark.skipif(exact_kernels() is None, reason="no C library")


def both(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    **more: Any,
) -> tuple[PackedModel, LeanForward, LeanForward]:
    """A model in int4, its forward in the library, and without. `scale`: of what MLPs read."""
    config = LLAMA_SHAPED[name]() if name in LLAMA_SHAPED else shaped(name)
    config.update(more)
    model = make_model(config, dtype)
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.data.mul_(scale)
    packed = PackedModel.wrap("m", model, VOCAB)
    packed.quantise_weights(weights="int4")
    direct_forward_of(packed)
    compiled = lean_forward_of(packed)
    monkeypatch.setattr(lean_forward, "compiled_layers", lambda *_: None)
    plain = lean_forward_of(packed)
    assert compiled is not None
    assert compiled._compiled is not None
    assert plain is not None
    assert plain._compiled is None
    return packed, compiled, plain


class Reader:
    """A forward that reads texts in packs."""

    def __init__(self, packed: PackedModel, forward: LeanForward, rows: int = 1) -> None:
        self.view = ProbeView(packed.device, 128, packed.kv_layers, rows)
        self._forward = forward

    def read(
        self,
        *spans: tuple[int, int],
        hidden: HiddenLayers = (),
        index: Tensor | None = None,
        token: int = 7919,
    ) -> ForwardOutput:
        """`spans`: by row positions of its tokens, of the first row multiples of `token`."""
        self.view.begin_pack(spans)
        positions = torch.cat([torch.arange(*span) for span in spans])
        factors = torch.tensor([token, *[7919] * len(spans)])
        rows = torch.from_numpy(np.repeat(self.view.pack.rows, self.view.pack.counts))
        tokens = (positions * factors[rows] + rows) % VOCAB
        wanted = torch.arange(len(positions)) if index is None else index
        return self._forward(tokens, positions, self.view, wanted, hidden)


def differ(got: Tensor, wanted: Tensor) -> float:
    """Where a level of activations is another one, by 1 / 127 of the largest; else by rounding."""
    return float((got.double() - wanted.double()).abs().mean() / wanted.double().std())


@pytest.mark.parametrize(
    ("name", "dtype", "scale", "more"),
    [
        ("llama", torch.bfloat16, 1.0, {}),
        ("llama", torch.float32, 1e-3, {}),
        ("llama", torch.float32, 30.0, {}),
        ("llama", torch.float32, 1e4, {}),  # gates beyond what an exponential holds
        ("llama-biased", torch.float32, 1.0, ODD),
        ("qwen3", torch.bfloat16, 1.0, ODD),
        ("granite", torch.float32, 1.0, ODD),
        ("gemma", torch.float32, 1.0, {}),
        ("gemma2", torch.float32, 1.0, {}),
        ("gemma3_text", torch.bfloat16, 30.0, {}),
    ],
)
@torch.inference_mode()
def test_a_pass_computes_what_operators_do(
    name: str,
    dtype: torch.dtype,
    scale: float,
    more: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, *forwards = both(name, monkeypatch, dtype, scale, **more)
    got, wanted = (
        [Reader(packed, one).read((0, 40), hidden=hidden) for hidden in ((), (0, 1))]
        for one in forwards
    )
    for own, expected in zip(got, wanted, strict=True):
        assert own.logits.isfinite().all()
        assert differ(own.logits, expected.logits) < 2e-2
    assert got[1].hidden is not None
    assert wanted[1].hidden is not None
    assert torch.equal(got[1].hidden[:, 0], wanted[1].hidden[:, 0])
    assert differ(got[1].hidden[:, 1], wanted[1].hidden[:, 1]) < 2e-2


@pytest.mark.parametrize(
    ("name", "more"), [("llama", ODD), ("qwen3", {}), ("gemma2", {}), ("gemma3_text", {})]
)
@torch.inference_mode()
def test_a_token_has_its_bits_in_all_company_and_on_all_threads(
    name: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, compiled, _ = both(name, monkeypatch, **more)
    # Threads share the rows of large packs; beside that of the text stand those of two others.
    with cpu_threads(1):
        whole = Reader(packed, compiled).read((0, 128)).logits
    for threads, size in ((1, 1), (2, 7), (2, 33), (3, 128)):
        reader = Reader(packed, compiled, rows=3)
        with cpu_threads(threads):
            for start in range(0, 128, size):
                span = start, min(start + size, 128)
                read = reader.read(span, (start, start + 1), span).logits
                assert torch.equal(read[: span[1] - start], whole[slice(*span)])


@torch.inference_mode()
def test_hidden_states_and_chosen_tokens_change_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, compiled, _ = both("llama", monkeypatch)
    whole = Reader(packed, compiled).read((0, 20))
    assert whole.hidden is None
    states = Reader(packed, compiled).read((0, 20), hidden=(0, 1, LAYERS))
    assert torch.equal(states.logits, whole.logits)
    assert states.hidden is not None
    assert states.hidden.shape[:2] == (20, 3)
    for index in ([], [3], [19, 0, 0, 7], list(range(20)) * 2):
        places = torch.tensor(index, dtype=torch.int64)
        for hidden in ((), (1,), (0, LAYERS)):
            read = Reader(packed, compiled).read((0, 20), hidden=hidden, index=places)
            assert torch.equal(read.logits, whole.logits[places])


@torch.inference_mode()
def test_keys_and_values_are_rounded_to_what_they_are_kept_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, compiled, _ = both("llama", monkeypatch)
    kept = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        packed.kv_layers = {at: replace(one, dtype=dtype) for at, one in packed.kv_layers.items()}
        reader = Reader(packed, compiled)
        reader.read((0, 128))
        kept[dtype] = reader.view._kv[0]
        for one, exact in zip(kept[dtype], kept[torch.float32], strict=True):
            assert torch.equal(one, exact.to(dtype))
    assert not torch.equal(kept[torch.float16][0].float(), kept[torch.float32][0])


@torch.inference_mode()
def test_what_is_no_number_fails_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, compiled, plain = both("llama", monkeypatch)
    reader = Reader(packed, compiled, rows=2)
    good = reader.read((0, 9), (0, 5)).logits
    weight = compiled._embedded.weight
    for value in (float("nan"), float("inf"), float("-inf")):
        damaged = weight.clone()
        damaged[5, 3] = value  # of the first row's tokens; the others' are multiples of 7,919
        for forward in (compiled, plain):
            monkeypatch.setattr(forward, "_embedded", SimpleNamespace(weight=damaged))
            read = Reader(packed, forward, rows=2).read((0, 9), (0, 5), token=5).logits
            assert not read[1:9].isfinite().any()
            assert forward is plain or torch.equal(read[9:], good[9:])


@pytest.mark.parametrize("name", ["olmo2", "phi3", "cohere", "starcoder2"])
def test_other_shapes_are_left_to_operators(name: str) -> None:
    packed = PackedModel.wrap("m", make_model(shaped(name), torch.bfloat16), VOCAB)
    packed.quantise_weights(weights="int4")
    direct_forward_of(packed)
    lean = lean_forward_of(packed)
    assert lean is not None
    assert lean._compiled is None
