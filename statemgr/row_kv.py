"""RowKV: the data that layers keep of a row's tokens, exported for another process.

Contract: contiguous host memory that any transport can carry, with a header by which the receiver
checks that it fits. The bits are those of the store, of any dtype, since memory is carried as
bytes; they do not depend on batches or on places in stores. Tokens read so far may be exported
piece by piece, and are imported in the same order. The states of recurrent layers go with the piece
that ends before the row's last token; without that piece the others are of no use.

This module does not decide how the bytes travel, or which model a row continues with.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from statemgr.arrays import Ints
from statemgr.kv_store import KVStore
from statemgr.model_state import ModelState

Bytes = NDArray[np.uint8]


class KVMismatchError(ValueError):
    """Error raised for keys and values that a row must not continue from."""


@dataclass(frozen=True)
class KVFormat:
    """Format of exported keys and values.

    Attributes:
        model: a fingerprint of everything besides the tokens that their bits depend on.
        dtype: name such as `bfloat16`.
        layers: for each layer that keeps keys and values: its KV heads, the width of keys and the
            width of values, which is 0 for latents, as these are both.
        recurrent: for each recurrent layer: the name of its kind, which determines its arithmetic,
            and the shapes and dtypes of its states.
    """

    model: str
    dtype: str
    layers: tuple[tuple[int, int, int], ...]
    recurrent: tuple[str, ...] = ()

    @classmethod
    def of(cls, state: ModelState, model: str) -> "KVFormat":
        """Return the format of a model's state.

        Raises:
            ValueError: layers have different dtypes.
        """
        parts = [state.store.kept(number) for number in state.store.own]
        dtypes = sorted({str(keys.dtype).removeprefix("torch.") for keys, *_ in parts})
        if len(dtypes) > 1:
            raise ValueError(f"layers of different dtypes: {', '.join(dtypes)}")
        layers = tuple(
            (*keys.shape[1:], sum(one.shape[2] for one in values)) for keys, *values in parts
        )
        return cls(model, dtypes[0] if dtypes else "float32", layers, state.recurrent.form)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers."""
        item = torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()
        return sum(heads * (key + value) * item for heads, key, value in self.layers)


@dataclass(frozen=True, eq=False, kw_only=True)
class RowKV:
    """Exported data of the tokens at positions `start .. start + count - 1`.

    Attributes:
        text: a digest of all tokens up to the last of them.
        data: [count * format.token_bytes], layer after layer, keys before values, each of them
            [count, kv_heads, width]. It may be read-only.
        state: the recurrent states after the last of them; empty if another piece has them.
    """

    format: KVFormat
    start: int
    count: int
    text: str
    data: Bytes
    state: Bytes = field(default_factory=lambda: np.empty(0, dtype=np.uint8))

    @property
    def stop(self) -> int:
        return self.start + self.count


def export_row(
    state: ModelState, row: int, start: int, stop: int, committed: Ints, model: str
) -> RowKV:
    """Copy what a row has of the positions `start .. stop - 1`.

    `committed` holds the row's tokens, [n]; for `model` see `KVFormat`.
    """
    assert 0 <= start < stop <= int(state.lengths(np.array([row]))[0]), "it has not read so far"
    store, slots = state.store, state.slots_of(row, stop)[start:]
    form = KVFormat.of(state, model)
    data: Bytes = np.empty(len(slots) * form.token_bytes, dtype=np.uint8)
    index = torch.from_numpy(slots)
    for part, piece in _pieces(store, data):
        piece[:] = _bytes_of(part.index_select(0, index.to(part.device)).cpu())
    text = _digest(committed[:stop])
    kv = RowKV(format=form, start=start, count=len(slots), text=text, data=data)
    if stop < len(committed) - 1 or not state.is_recurrent:
        return kv
    parts = [_bytes_of(part.cpu()) for part in state.recurrent.parts(row)]
    return replace(kv, state=np.concatenate(parts))


def import_row(state: ModelState, row: int, kv: RowKV, committed: Ints, model: str) -> int:
    """Append the tokens of `kv` that a row lacks, and return their number.

    Tokens that the row has stay. All blocks are taken before anything is written. For `committed`
    and `model` see `export_row`.

    Raises:
        KVMismatchError: `kv` is of another model or text, or does not follow what the row has.
        ValueError: the row has no room.
    """
    held = int(state.lengths(np.array([row]))[0])
    check_kv(state, kv, held, committed, model)
    added = kv.stop - held
    if added <= 0:
        return 0
    positions = np.arange(held, kv.stop)
    state.append(np.array([row]), np.array([added]), committed[positions], positions)
    index = torch.from_numpy(state.slots_of(row, kv.stop)[held:])
    try:
        for part, piece in _pieces(state.store, kv.data):
            token = len(piece) // kv.count
            host = torch.empty((added, *part.shape[1:]), dtype=part.dtype)
            _write(host, piece[(held - kv.start) * token :])
            part.index_copy_(0, index.to(part.device), host.to(part.device))
        if len(kv.state):
            _load_state(state, row, kv)
    except BaseException:
        state.free(row)
        raise
    return added


def check_kv(state: ModelState, kv: RowKV, held: int, committed: Ints, model: str) -> None:
    """Check that a row that has read `held` tokens may continue from `kv`.

    Raises:
        KVMismatchError: it may not.
    """
    own, theirs = KVFormat.of(state, model), kv.format
    if theirs.model != own.model:
        raise KVMismatchError(f"of the model {theirs.model}, not {own.model}")
    if theirs.dtype != own.dtype:
        raise KVMismatchError(f"in {theirs.dtype}, not {own.dtype}")
    if theirs.layers != own.layers:
        raise KVMismatchError(f"of layers {theirs.layers}, not {own.layers}")
    if theirs.recurrent != own.recurrent:
        raise KVMismatchError(f"of recurrent layers {theirs.recurrent}, not {own.recurrent}")
    if len(kv.state) not in (0, state.recurrent.row_bytes):
        raise KVMismatchError(f"with {len(kv.state)} bytes of recurrent states")
    if kv.data.dtype != np.uint8 or kv.data.shape != (kv.count * own.token_bytes,):
        expected = f"{kv.count} x {own.token_bytes} bytes"
        raise KVMismatchError(f"{kv.data.dtype} {kv.data.shape}, not {expected}")
    if kv.start > held:
        raise KVMismatchError(f"from position {kv.start} on, where the row has {held}")
    if kv.stop >= len(committed):
        raise KVMismatchError(f"of {kv.stop} tokens, where {len(committed)} are committed")
    if kv.text != _digest(committed[: kv.stop]):
        raise KVMismatchError("of another text")


def _pieces(store: KVStore, data: Bytes) -> Iterator[tuple[Tensor, Bytes]]:
    """Yield each layer's keys or values, [slots, kv_heads, width], with their part of the bytes."""
    parts = [part for number in store.own for part in store.kept(number)]
    sizes = [part[0].numel() * part.element_size() for part in parts]
    count, start = len(data) // max(sum(sizes), 1), 0
    for part, size in zip(parts, sizes, strict=True):
        yield part, data[start : start + count * size]
        start += count * size


def _load_state(state: ModelState, row: int, kv: RowKV) -> None:
    start = 0
    for part in state.recurrent.parts(row):
        _write(part, kv.state[start : start + part.nbytes])
        start += part.nbytes
    state.recurrent.begin_at(row, kv.stop)


def _bytes_of(tensor: Tensor) -> Bytes:
    """Return the memory of a contiguous host tensor as flat bytes, not copied."""
    flat: Bytes = tensor.view(torch.uint8).numpy().reshape(-1)
    return flat


def _write(part: Tensor, data: Bytes) -> None:
    """Write bytes to a contiguous piece of a store."""
    if part.device.type == "cpu":
        _bytes_of(part)[:] = data
        return
    host = torch.empty(part.shape, dtype=part.dtype)
    _bytes_of(host)[:] = data
    part.copy_(host)


def _digest(tokens: Ints) -> str:
    return hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=12).hexdigest()
