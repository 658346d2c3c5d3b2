"""Small random checkpoints as AutoAWQ, AutoGPTQ, compressed-tensors and DeepSeek pack theirs.

Contract: each word is put together here as its format's own packer does it, number by number. The
plain checkpoint beside it has the numbers that the format's own formula makes of what was packed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from modelpool import ModelPool
from test_support.factories import pool_of, save_model
from tests.modelpool.compressed import WEIGHTS, declare, scheme

Packed = tuple[dict[str, Tensor], Tensor]  # by endings of names; and the weight [out, in] float64
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Format:
    """`pack`: random weights of so many outputs and inputs."""

    name: str
    declared: Mapping[str, Any]
    pack: Callable[[np.random.Generator, int, int], Packed]


def checkpoints(
    form: Format, folder: Path, kind: type[Any] = LlamaConfig, **settings: Any
) -> tuple[Path, Path]:
    """The packed one, and the plain one in float32. The linear layers of its layers are packed."""
    options = {"hidden": 64, "tied": False, **settings}
    plain = save_model(kind, folder / "plain", dtype="float32", **options)
    stored = save_model(kind, folder / "stored", dtype="float16", **options)
    declare(stored, dict(form.declared))
    random = np.random.default_rng(0)
    numbers, packed = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    for name, weight in sorted(load_file(stored / "model.safetensors").items()):
        if ".layers." not in name or weight.dim() != 2 or name.endswith(".gate.weight"):
            numbers[name] = weight.float()
            packed[name] = weight
            continue
        parts, values = form.pack(random, *weight.shape)
        numbers[name] = values.float()
        stem = name.removesuffix("weight")
        packed |= {stem + ending: one for ending, one in parts.items()}
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    save_file(packed, stored / "model.safetensors", {"format": "pt"})
    return stored, plain


def same_weights(pools: Sequence[ModelPool], tolerance: float = 0.0) -> Mapping[str, Tensor]:
    """Those that members of both have. `tolerance`: relative."""
    found, wanted = (dict(pool.get("m").model.named_parameters()) for pool in pools)
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        torch.testing.assert_close(one, wanted[name], rtol=tolerance, atol=0)
    return found


def check_same(stored: Path, plain: Path, dtype: str, tolerance: float = 0.0) -> None:
    """Both have the same weights, are counted so, and the packed one is warned of."""
    pools = [pool_of(path, dtype=dtype, pack_weights=False) for path in (stored, plain)]
    found, plans = same_weights(pools, tolerance), [pool.plan("m") for pool in pools]
    assert plans[0].footprint == plans[1].footprint
    held = sum(one.nbytes for one in found.values())
    assert abs(plans[0].footprint.weight_bytes - held) < 0.03 * held
    assert f"weights are kept in {dtype}" in str(plans[0].warning)
    assert "weights are kept" not in str(plans[1].warning)


def awq(random: np.random.Generator, outputs: int, inputs: int) -> Packed:
    groups = inputs // 32
    numbers, zeros = (
        random.integers(0, 16, (inputs, outputs)),
        random.integers(0, 16, (groups, outputs)),
    )
    scales = _scales(random, groups, outputs)
    words = [np.zeros((len(one), outputs // 8), np.uint32) for one in (numbers, zeros)]
    for word, one in zip(words, (numbers, zeros), strict=True):
        for column in range(outputs // 8):
            for place, number in enumerate(_AWQ_ORDER):
                word[:, column] |= one[:, column * 8 + number].astype(np.uint32) << (place * 4)
    weight = (numbers - zeros.repeat(32, 0)) * scales.repeat(32, 0)
    qweight, qzeros = map(_signed, words)
    parts = {"qweight": qweight, "qzeros": qzeros, "scales": torch.from_numpy(scales).half()}
    return parts, torch.from_numpy(weight.T.copy())


def gptq(bits: int = 4, stored_less: int = 1, in_order: bool = True, size: int = 32) -> Any:
    """`stored_less`: what is taken off zeros; of version 1 it is 1."""

    def pack(random: np.random.Generator, outputs: int, inputs: int) -> Packed:
        groups, most = -(-inputs // size), 2**bits
        numbers = random.integers(0, most, (inputs, outputs))
        zeros = random.integers(stored_less, most, (groups, outputs))
        scales, index = _scales(random, groups, outputs), np.arange(inputs) // size
        if not in_order:
            index = random.permutation(index)
        weight = (numbers - zeros[index]) * scales[index]
        stored = (zeros - stored_less).astype(np.uint32)
        in_word = 32 // bits
        qweight = np.zeros((inputs // in_word, outputs), np.uint32)
        qzeros = np.zeros((groups, outputs // in_word), np.uint32)
        for one in range(inputs):
            qweight[one // in_word] |= numbers[one].astype(np.uint32) << (bits * (one % in_word))
        for one in range(outputs):
            qzeros[:, one // in_word] |= stored[:, one] << (bits * (one % in_word))
        parts = {"qweight": _signed(qweight), "qzeros": _signed(qzeros)}
        parts |= {"scales": torch.from_numpy(scales).half(), "g_idx": torch.from_numpy(index).int()}
        return parts, torch.from_numpy(weight.T.copy())

    return pack


def packed(bits: int = 4, size: int | None = 32, zeros: str = "", order: str = "") -> Any:
    """compressed-tensors. `zeros`: "packed", or "plain" as older versions have them. `order`: of
    inputs, "given" or "none", which is written as -1."""

    def pack(random: np.random.Generator, outputs: int, inputs: int) -> Packed:
        groups, half, in_word = inputs // (size or inputs), 2 ** (bits - 1), 32 // bits
        numbers = random.integers(-half, half, (outputs, inputs))
        points = random.integers(-half, half, (outputs, groups)) * bool(zeros)
        scales, index = _scales(random, outputs, groups), np.arange(inputs) // (size or inputs)
        if order == "given":
            index = random.permutation(index)
        weight = (numbers - points[:, index]) * scales[:, index]
        words = np.zeros((outputs, inputs // in_word), np.uint32)
        for place in range(in_word):
            words |= (numbers[:, place::in_word] + half).astype(np.uint32) << (bits * place)
        of_zeros = np.zeros((outputs // in_word, groups), np.uint32)
        for place in range(in_word):
            of_zeros |= (points[place::in_word] + half).astype(np.uint32) << (bits * place)
        parts = {"weight_packed": _signed(words), "weight_shape": torch.tensor([outputs, inputs])}
        parts["weight_scale"] = torch.from_numpy(scales).half()
        if zeros:
            plain = torch.from_numpy(points).to(torch.int8)
            parts["weight_zero_point"] = _signed(of_zeros) if zeros == "packed" else plain
        if order:
            given = torch.from_numpy(index).int()
            parts["weight_g_idx"] = given if order == "given" else torch.full_like(given, -1)
        return parts, torch.from_numpy(weight)

    return pack


def fp8(random: np.random.Generator, outputs: int, inputs: int) -> Packed:
    """In blocks of 48 outputs and 40 inputs, of which the last are cut short."""
    drawn = torch.from_numpy(random.normal(size=(outputs, inputs)) * 100)
    weight = drawn.clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.from_numpy(random.uniform(1e-4, 1e-3, (-(-outputs // 48), -(-inputs // 40))))
    values = weight.double()
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = values[row * 48 : row * 48 + 48, column * 40 : column * 40 + 40]
            block *= scales[row, column].float().double()
    return {"weight": weight, "weight_scale_inv": scales.float()}, values


def _scales(random: np.random.Generator, *shape: int) -> NDArray[np.float64]:
    """That float16 has."""
    return random.uniform(0.002, 0.02, shape).astype(np.float16).astype(np.float64)


def _signed(words: NDArray[np.uint32]) -> Tensor:
    return torch.from_numpy(words.view(np.int32).copy())


def _four(**weights: Any) -> dict[str, Any]:
    more = {"num_bits": 4, "strategy": "group", "group_size": 32, **weights}
    group = {"targets": ["Linear"], "weights": WEIGHTS | more, "input_activations": None}
    return scheme(format="pack-quantized", config_groups={"group_0": group})


def _gptq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, **settings}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [48, 40], "activation_scheme": "dynamic"}
FORMATS = {
    one.name: one
    for one in (
        Format("awq", AWQ, awq),
        Format("gptq", _gptq(), gptq()),
        Format("gptq-2-bits", _gptq(bits=2), gptq(bits=2)),
        Format("gptq-8-bits", _gptq(bits=8), gptq(bits=8)),
        Format("gptq-v2", _gptq(checkpoint_format="gptq_v2"), gptq(stored_less=0)),
        Format("gptq-by-activation", _gptq(desc_act=True), gptq(in_order=False)),
        Format("gptq-channel", _gptq(group_size=-1, desc_act=True), gptq(size=10**6)),
        Format("gptq-odd-groups", _gptq(group_size=48), gptq(size=48)),
        Format("packed", _four(), packed()),
        Format("packed-8-bits", _four(num_bits=8), packed(bits=8)),
        Format("packed-channel", _four(strategy="channel", group_size=None), packed(size=None)),
        Format("packed-zeros", _four(symmetric=False), packed(zeros="packed")),
        Format("packed-old-zeros", _four(symmetric=False), packed(zeros="plain")),
        Format("packed-ordered", _four(actorder="group"), packed(order="given")),
        Format("packed-unordered", _four(actorder="weight"), packed(order="none")),
        Format("fp8", FP8, fp8),
    )
}
