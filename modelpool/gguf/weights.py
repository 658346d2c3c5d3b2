"""The weights of a GGUF file: as they are, or as a checkpoint of safetensors while they load."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.checkpoint.block_values import BLOCK_BYTES, BlockValues, StoredBlocks
from modelpool.checkpoint.temporary import temporary_folder, write_weights
from modelpool.gguf.description import (
    NAME,
    described_in,
    int8_weights,
    weights_in_blocks,
)
from modelpool.gguf.header import GgufTensor
from modelpool.gguf.placement import Placed, Tensors
from modelpool.kernels.library import c_library

_AT_ONCE = 2**24  # values that are read at once
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WIDE = ("float32", "float64")
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True)
class PlainCheckpoint:
    """A checkpoint of safetensors, with facts about the file's weights.

    `in_int8`: layers that need at least int8. `blocks`: weights that the file has in blocks, by
    layer.
    """

    folder: Path
    in_int8: frozenset[str] = frozenset()
    blocks: Mapping[str, StoredBlocks] = field(default_factory=dict)


@dataclass(frozen=True)
class _Blocks(StoredBlocks):
    tensors: Tensors
    placed: Placed

    def read(self, expert: int = 0) -> Sequence[BlockValues | None]:
        library = c_library()
        return [
            BlockValues.of(kind, rows, library)
            if kind in BLOCK_BYTES and library is not None
            else None
            for kind, rows in self._rows(expert)
        ]

    def plain(self, expert: int = 0) -> Sequence[Tensor]:
        return [_values(rows, kind) for kind, rows in self._rows(expert)]

    def _rows(self, expert: int) -> Sequence[tuple[str, NDArray[np.uint8]]]:
        """Return the type and the rows' bytes of each tensor; a layer's tensors are joined."""
        tensors = self.placed.tensors(self.tensors)
        found = [
            rows for one in tensors for rows in _stored(one, self.placed, expert, at_once=None)
        ]
        if self.placed.form == "in turn, turned":
            found = [np.stack(found, axis=1).reshape(-1, found[0].shape[1])]
        elif self.placed.parts == 1 and len(found) > 1:
            found = [np.concatenate(found)]
        return [(one.type, rows) for one, rows in zip(tensors, found, strict=False)]


@dataclass(frozen=True)
class GgufWeights:
    """Weights by the model's names; if `is_wide`, quantised ones that become plain are float32."""

    tensors: Tensors
    placed: Mapping[str, Placed]
    is_wide: bool

    @classmethod
    def of(cls, folder: Path, dtype: str) -> "GgufWeights":
        """Read what `folder` describes for a model in `dtype`; raise `OSError`, `ValueError`."""
        found = described_in(folder)
        return cls(found.tensors, found.placed, dtype in _WIDE)

    @cached_property
    def in_int8(self) -> frozenset[str]:
        """Layers that need at least int8."""
        names = int8_weights(self.tensors, self.placed)
        return frozenset(name.removesuffix(".weight") for name in names)

    @cached_property
    def blocks(self) -> Mapping[str, StoredBlocks]:
        """Weights that the file has in blocks, by layer; a tied head has the embedding's."""
        found = {
            name.removesuffix(".weight"): _Blocks(self.tensors, self.placed[name])
            for name in weights_in_blocks(self.tensors, self.placed)
        }
        if f"{_HEAD}.weight" not in self.placed and _EMBEDDING in found:
            found[_HEAD] = found[_EMBEDDING]
        return found

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter."""
        wide = torch.float32 if self.is_wide else torch.bfloat16
        tensors = self.placed[name].tensors(self.tensors)
        return reduce(torch.promote_types, (_PLAIN.get(one.type, wide) for one in tensors))

    def rows(self, name: str) -> Iterator[Tensor]:
        """Yield the values of a parameter in the model's order, a few rows [n, in] at a time.

        A vector comes as a whole.
        """
        placed = self.placed[name]
        made, changed = _OF_PARTS.get(placed.form), _OF_VALUES.get(placed.form)
        tensors = placed.tensors(self.tensors)
        for number in range(placed.parts):
            read = [_rows(one, placed, number) for one in tensors]
            if made is not None:
                yield made(*(torch.cat(list(rows)) for rows in read))
                continue
            for rows in chain.from_iterable(read):
                yield rows if changed is None else changed(rows)

    def plain(self, name: str) -> Tensor:
        """Return a whole parameter."""
        dtype, shape = self.dtype(name), self.placed[name].shape
        return torch.cat([rows.to(dtype).flatten() for rows in self.rows(name)]).view(shape)


# Conversions by the form of a parameter: of some rows, and of a part of each tensor.
_OF_VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "less one": lambda rows: rows - 1.0,
    "log": lambda rows: rows.neg().log(),
}
_OF_PARTS: Mapping[str, Callable[..., Tensor]] = {
    "turned": lambda part: part.t(),
    "in turn": lambda *parts: torch.stack(parts, 2).flatten(1),
    "in turn, turned": lambda *parts: torch.stack(parts, 1).flatten(0, 1).t(),
    "first turned": lambda first, second: torch.cat((first.t(), second)),
}


@contextmanager
def plain_checkpoint(folder: Path, dtype: str) -> Iterator[PlainCheckpoint]:
    """Yield a checkpoint of what `folder` describes; `folder` itself if it has weights.

    `dtype`: the one asked for; in half precision, quantised weights are bfloat16. Raises `OSError`,
    `ValueError`, `ConfigError`.
    """
    if not (folder / NAME).is_file():
        yield PlainCheckpoint(folder)
        return
    weights = GgufWeights.of(folder, dtype)
    planned = {name: (weights.dtype(name), one.shape) for name, one in weights.placed.items()}
    with temporary_folder(folder.parent) as out:
        shutil.copy(folder / "config.json", out)
        write_weights(out, planned, weights.rows)
        yield PlainCheckpoint(out, weights.in_int8, weights.blocks)


def _rows(tensor: GgufTensor, placed: Placed, number: int) -> Iterator[Tensor]:
    """Yield the values of `_stored`, with columns in the model's order."""
    for stored in _stored(tensor, placed, number):
        rows = _values(stored, tensor.type)
        yield rows[:, _order(placed.columns, tensor.shape[-1])] if placed.columns else rows


def _stored(
    tensor: GgufTensor, placed: Placed, number: int, at_once: int | None = _AT_ONCE
) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of the rows of one of the parts, so many values at once; None: all."""
    count = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 or not placed.rows else (
        tensor.shape[0]  # numbers in another order are rows
    )  # fmt: skip
    laid = (count, tensor.size_bytes // count)
    stored = np.memmap(tensor.file, np.uint8, "r", tensor.start, laid)
    order = _order(placed.rows, count) if placed.rows else None
    step = count if at_once is None else max(at_once // tensor.shape[-1], 1)
    first, end = (part * count // placed.parts for part in (number, number + 1))
    for start in range(first, end, step):
        rows = slice(start, min(start + step, end))
        yield stored[rows] if order is None else stored[order[rows]]


def _order(groups: Sequence[int], count: int) -> NDArray[np.int64]:
    """Return the order in which the model has rows of the file; see `Placed.rows`."""
    places = np.arange(count)
    moved = places[count - math.prod(groups) :].reshape(*groups).swapaxes(1, 2)
    return np.concatenate((places[: count - moved.size], moved.reshape(-1)))


def _values(stored: NDArray[np.uint8], kind: str) -> Tensor:
    """Return the values in the bytes of rows."""
    if kind in _PLAIN:
        return torch.from_numpy(np.array(stored)).view(_PLAIN[kind])
    import gguf  # optional, and slow to import

    return torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType[kind]))
