"""The weights of a GGUF file as a checkpoint of safetensors, while they are loaded."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.checkpoint.block_values import BLOCK_BYTES, BlockValues, StoredBlocks
from modelpool.checkpoint.temporary import temporary_folder, write_weights
from modelpool.gguf.description import (
    NAME,
    Placed,
    header_in,
    int8_weights,
    placed_in,
    weights_in_blocks,
)
from modelpool.gguf.header import GgufHeader, GgufTensor

_AT_ONCE = 2**24  # values
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WIDE = ("float32", "float64")


@dataclass(frozen=True)
class Plain:
    """A checkpoint of safetensors, names of layers that are in no fewer bits than int8, and by
    layer the weights that the file has in blocks."""

    folder: Path
    in_int8: frozenset[str] = frozenset()
    blocks: Mapping[str, StoredBlocks] = field(default_factory=dict)


@dataclass(frozen=True)
class _Blocks(StoredBlocks):
    header: GgufHeader
    placed: Placed

    def read(self, expert: int = 0) -> Sequence[BlockValues | None]:
        return [self._part(one, expert) for one in self.placed.tensors(self.header)]

    def _part(self, tensor: GgufTensor, expert: int) -> BlockValues | None:
        if tensor.type not in BLOCK_BYTES:
            return None
        parts = tensor.shape[0] if len(tensor.shape) == 3 else 1
        rows = list(_stored(tensor, self.placed, expert, parts))
        return BlockValues.of(tensor.type, np.concatenate(rows))


@contextmanager
def plain_checkpoint(folder: Path, dtype: str) -> Iterator[Plain]:
    """What `folder` describes with its weights; `folder` itself where it has them.

    `dtype`: that is asked for; in half precision quantised weights are bfloat16. Raises `OSError`,
    `ValueError`, `ConfigError`.
    """
    if not (folder / NAME).is_file():
        yield Plain(folder)
        return
    header, placed = header_in(folder), placed_in(folder)
    is_wide = dtype in _WIDE
    planned = {
        name: (_kept(one.tensors(header), is_wide), one.shape(header))
        for name, one in placed.items()
    }
    with temporary_folder(folder.parent) as out:
        shutil.copy(folder / "config.json", out)
        write_weights(out, planned, lambda name: _rows(header, placed[name]))
        wide = (name.removesuffix(".weight") for name in int8_weights(header, placed))
        blocks = {
            name.removesuffix(".weight"): _Blocks(header, placed[name])
            for name in weights_in_blocks(header, placed)
        }
        yield Plain(out, frozenset(wide), blocks)


def _kept(tensors: Sequence[GgufTensor], is_wide: bool) -> torch.dtype:
    wide = torch.float32 if is_wide else torch.bfloat16
    return reduce(torch.promote_types, (_PLAIN.get(one.type, wide) for one in tensors))


def _rows(header: GgufHeader, placed: Placed) -> Iterator[Tensor]:
    """A few at a time, [n, in] or all of a vector, in the model's order."""
    tensors = placed.tensors(header)
    experts = tensors[0].shape[0] if placed.second else 1  # of which each has rows of both
    for number in range(experts):
        for tensor in tensors:
            for stored in _stored(tensor, placed, number, experts):
                yield _values(stored, tensor.type) - placed.added


def _stored(
    tensor: GgufTensor, placed: Placed, number: int, parts: int
) -> Iterator[NDArray[np.uint8]]:
    """Rows' bytes, of one of so many equal parts."""
    count = int(np.prod(tensor.shape[:-1]))
    laid = (count, tensor.size_bytes // count)
    stored = np.memmap(tensor.file, np.uint8, "r", tensor.start, laid)
    order = np.arange(count)
    if placed.heads:
        order = order.reshape(placed.heads, -1, 2).swapaxes(1, 2).reshape(-1)
    step = max(_AT_ONCE // tensor.shape[-1], 1)
    first, end = number * count // parts, (number + 1) * count // parts
    for start in range(first, end, step):
        yield stored[order[start : min(start + step, end)]]


def _values(stored: NDArray[np.uint8], kind: str) -> Tensor:
    """Of rows' bytes."""
    import gguf  # optional, and slow to import

    if kind in _PLAIN:
        return torch.from_numpy(stored).view(_PLAIN[kind])
    return torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType[kind]))
