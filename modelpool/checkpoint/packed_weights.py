"""Packed weights of a checkpoint, unpacked to the numbers that they stand for.

Contract: a value is `(number - zero) * scale`, or FP8 times its block's scale, in float32, which is
exact except for FP8. The headers alone show which tensors a layer needs, and whether they fit
together. Sources: AutoAWQ (`gemm`), AutoGPTQ, compressed-tensors (`pack-quantized`), DeepSeek's
FP8.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.checkpoint.block_values import GROUP, BlockValues, StoredBlocks
from modelpool.checkpoint.dtypes import NAMED_DTYPES
from modelpool.checkpoint.headers import Header, grouped
from modelpool.checkpoint.quantization import Packing
from modelpool.errors import ConfigError

_AT_ONCE = 2**22  # values that are unpacked at once, which limits the memory
_WORD = 32  # bits
_MOST_BITS = 4  # limit for numbers that are kept in blocks
_AWQ_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # place of each output in a word of eight
_ORDERS = ("g_idx", "weight_g_idx")  # tensors with the number of each input's group
_ZERO_POINT = "weight_zero_point"
_OPTIONAL = (*_ORDERS, _ZERO_POINT, "weight_shape")
_FLOATS = ("F16", "BF16", "F32")
_DTYPES: Mapping[str, tuple[str, ...]] = {
    "qweight": ("I32",), "weight_packed": ("I32",), "weight": ("F8_E4M3",), "qzeros": ("I32",),
    _ZERO_POINT: ("I32", "I8"), "scales": _FLOATS, "weight_scale": _FLOATS,
    "weight_scale_inv": _FLOATS, "weight_shape": ("I32", "I64"),
    **dict.fromkeys(_ORDERS, ("I32", "I64")),
}  # fmt: skip


@dataclass(frozen=True)
class StoredPackedWeight:
    """The packed weight of a linear layer.

    `shape` is [out, in], of the plain weight; `parts` are the ends of its tensors' names.
    """

    layer: str
    shape: tuple[int, int]
    packing: Packing
    parts: tuple[str, ...]

    def rows(self, tensor: Callable[[str], Tensor]) -> Iterator[Tensor]:
        """Yield all values, in parts of [n, in] float32.

        `tensor` returns a tensor of the checkpoint by its name. Raises `ValueError` for an input
        whose group does not exist, and for padded rows.
        """
        outputs, inputs = self.shape
        parts = {part: tensor(f"{self.layer}.{part}") for part in self.parts}
        said = parts.get("weight_shape")
        if said is not None and said.tolist() != [outputs, inputs]:
            wanted = f"and not [{outputs}, {inputs}]: padded weights are not read"
            raise ValueError(f"{self.layer}.weight_shape says {said.tolist()}, {wanted}")
        scales, zeros, groups = self._scales(parts), self._zeros(parts), self._groups(parts)
        step = max(_AT_ONCE // inputs // _WORD, 1) * _WORD  # whole words
        for start in range(0, outputs, step):
            span = slice(start, min(start + step, outputs))
            values = self._numbers(parts, span).float()
            if zeros is not None:
                values -= zeros[span].index_select(1, groups)
            yield values.mul_(scales[span].index_select(1, groups))

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.packing.group or self.shape[1]

    @property
    def has_blocks(self) -> bool:
        """True for numbers of at most 4 bits, in groups that the kernels support."""
        is_small = self.packing.stored != "fp8" and self.packing.bits <= _MOST_BITS
        return is_small and self.group % GROUP == self.shape[1] % self.group == 0

    def blocks(self, tensor: Callable[[str], Tensor]) -> BlockValues | None:
        """Return the same values in blocks; call it only if `has_blocks`.

        None if groups are out of order, or a scale is not in float16. `tensor`: see `rows`.
        """
        parts = {part: tensor(f"{self.layer}.{part}") for part in self.parts}
        scales, zeros = self._scales(parts), self._zeros(parts)
        steps, plain = scales.half(), torch.arange(self.shape[1]) // self.group
        if not (torch.equal(steps.float(), scales) and torch.equal(self._groups(parts), plain)):
            return None
        numbers = self._numbers(parts, slice(0, self.shape[0]))
        centres = torch.zeros_like(scales) if zeros is None else zeros
        signed = self.packing.stored == "packed"
        least = 2 ** (self.packing.bits - 1) if signed else 0
        centres = (centres + least).to(torch.uint8).repeat_interleave(self.group // GROUP, 1)
        nibbles = (numbers + least).to(torch.uint8)
        return BlockValues(numbers=nibbles, bits=4, steps=steps, bases=steps, centres=centres)

    def _scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the scales, [out, groups] float32."""
        stored = self.packing.stored
        if stored == "fp8":
            scales = parts["weight_scale_inv"].float()
            return scales.repeat_interleave(self.packing.block[0], 0)[: self.shape[0]]
        return (parts["weight_scale"] if stored == "packed" else parts["scales"].t()).float()

    def _zeros(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        """Return the zeros, [out, groups] float32, or None if it has none."""
        bits = self.packing.bits
        if "qzeros" in parts:
            found = self._fields(parts["qzeros"]).add_(self.packing.added)
            return found.bitwise_and_(2**bits - 1).t().float()
        zeros = parts.get(_ZERO_POINT)
        if zeros is None or zeros.dtype == torch.int8:
            return None if zeros is None else zeros.float()
        found = self._fields(zeros.t()).t()[: self.shape[0]].float()
        return found.sub_(2.0 ** (bits - 1))

    def _numbers(self, parts: Mapping[str, Tensor], span: slice) -> Tensor:
        """Return the numbers of the outputs in `span`, [n, in]."""
        stored, bits = self.packing.stored, self.packing.bits
        if stored == "awq":
            words = slice(span.start * bits // _WORD, span.stop * bits // _WORD)
            return self._fields(parts["qweight"][:, words]).t()
        if stored == "gptq":
            return self._fields(parts["qweight"][:, span].t())
        if stored == "packed":
            return self._fields(parts["weight_packed"][span]).sub_(2 ** (bits - 1))
        return parts["weight"][span]

    def _fields(self, words: Tensor) -> Tensor:
        """Unpack [n, words] to [n, numbers]."""
        bits = self.packing.bits
        fields = words.unsqueeze(2) >> torch.arange(0, _WORD, bits, dtype=torch.int32)
        fields.bitwise_and_(2**bits - 1)
        if self.packing.stored == "awq":
            fields = fields[:, :, _AWQ_PLACES]
        return fields.flatten(1)

    def _groups(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the number of each input's group, [in] int64."""
        inputs = self.shape[1]
        size = self.packing.block[1] if self.packing.stored == "fp8" else self.packing.group
        plain = torch.arange(inputs) // (size or inputs)
        for name in (one for one in _ORDERS if one in parts):
            given, most = parts[name].long(), int(plain[-1])
            if bool((given == -1).all()):  # in compressed-tensors: no order
                return plain
            if int(given.min()) < 0 or int(given.max()) > most:
                raise ValueError(f"{self.layer}.{name} has a group that is none of 0 to {most}")
            return given
        return plain


@dataclass(frozen=True)
class PackedBlocks(StoredBlocks):
    """A packed weight that is read in blocks; for `tensor` see `PackedWeight.rows`."""

    weight: StoredPackedWeight
    tensor: Callable[[str], Tensor]

    def read(self, expert: int = 0) -> Sequence[BlockValues | None]:
        return [self.weight.blocks(self.tensor)]

    def plain(self, expert: int = 0) -> Sequence[Tensor]:
        return [torch.cat(list(self.weight.rows(self.tensor)))]


def packed_weights(header: Header, packing: Packing) -> dict[str, StoredPackedWeight]:
    """Return the packed weights by the names of the plain ones.

    `header`: header of all files together. Raises `ConfigError`, with the tensor's name, for one
    that is missing, or whose shape or dtype does not fit the others.
    """
    first, *others = packing.parts
    ends = tuple(f".{part}" for part in (packing.parts if first != "weight" else others))
    layers = {name.rpartition(".")[0] for name in header if name.endswith(ends)}
    layers |= {
        name.rpartition(".")[0] for name, one in header.items() if one["dtype"].startswith("F8")
    }
    found = dict[str, StoredPackedWeight]()
    for layer in sorted(layers):
        there = [part for part in (*packing.parts, *_OPTIONAL) if f"{layer}.{part}" in header]
        if not there:
            raise ConfigError("", f"has FP8 tensors in {layer}, which are no layer's weight")
        for part in packing.parts:
            if part not in there:
                raise ConfigError("", f"has {layer}.{there[0]}, and no {layer}.{part}")
        parts = tuple(dict.fromkeys(there))
        entries = {part: header[f"{layer}.{part}"] for part in parts}
        found[f"{layer}.weight"] = StoredPackedWeight(
            layer, _checked(layer, entries, packing), packing, parts
        )
    return found


def plain_header(header: Header, packed: Mapping[str, StoredPackedWeight]) -> Header:
    """Return the header with plain weights in place of packed ones.

    Raises `ConfigError` for another tensor whose dtype is not supported.
    """
    gone = {f"{one.layer}.{part}" for one in packed.values() for part in one.parts}
    plain = {name: entry for name, entry in header.items() if name not in gone}
    for name, entry in plain.items():
        if entry["dtype"] not in NAMED_DTYPES:
            raise ConfigError("", f"has {name} in {entry['dtype']}, which is not read")
    return plain | {
        name: {
            "dtype": grouped(one.group) if one.has_blocks else "BF16",
            "shape": one.shape,
        }
        for name, one in packed.items()
    }


def _checked(layer: str, entries: Header, packing: Packing) -> tuple[int, int]:
    """Return the shape [out, in] of a weight, after a check that its parts fit it."""
    first = packing.parts[0]
    stored = tuple(entries[first]["shape"])
    in_word = _WORD // packing.bits
    if len(stored) != 2 or min(stored) < 1:
        raise ConfigError("", f"{layer}.{first} is {list(stored)}, and no matrix")
    outputs, inputs = stored
    if packing.stored == "awq":
        outputs, inputs = stored[1] * in_word, stored[0]
    elif packing.stored == "gptq":
        outputs, inputs = stored[1], stored[0] * in_word
    elif packing.stored == "packed":
        inputs *= in_word
    groups, words = -(-inputs // (packing.group or inputs)), -(-outputs // in_word)
    rows, columns = packing.block
    is_byte = entries.get(_ZERO_POINT, {}).get("dtype") == "I8"
    wanted: Mapping[str, tuple[int, ...]] = {
        "qzeros": (groups, words), "scales": (groups, outputs), "weight_scale": (outputs, groups),
        _ZERO_POINT: (outputs if is_byte else words, groups),
        "weight_scale_inv": (-(-outputs // rows), -(-inputs // columns)),
        "weight_shape": (2,), **dict.fromkeys(_ORDERS, (inputs,)),
    }  # fmt: skip
    for part, entry in entries.items():
        said, shape = tuple(entry["shape"]), wanted.get(part, stored)
        if said != shape:
            raise ConfigError("", f"{layer}.{part} is {list(said)}, and not {list(shape)}")
        if entry["dtype"] not in _DTYPES[part]:
            reason = f"{entry['dtype']}, and not {' or '.join(_DTYPES[part])}"
            raise ConfigError("", f"{layer}.{part} is in {reason}")
    return outputs, inputs
