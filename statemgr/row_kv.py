"""RowKV: what layers keep of a row's tokens outside of any store, for another process to go on.

Contract: contiguous memory of the host that any transport can carry, with a header by which whoever
takes it sees whether it fits. The bits are the store's, of any dtype, since memory is carried as
bytes; neither batches nor places in stores play a part. What was read so far may be exported piece
by piece, and is imported in the same order. Recurrent layers' states go with the piece that ends
before the row's last token: without it the others are of no use.

Not here: how the bytes travel, and which model a row goes on with.
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
    """Keys and values that a row must not go on from."""


@dataclass(frozen=True)
class KVFormat:
    """What keys and values are of.

    Attributes:
        model: a fingerprint of all that their bits depend on beside the tokens.
        dtype: such as `bfloat16`.
        layers: of each that keeps keys and values its KV heads, and the widths of the two; of
            latents, which are both, 0 for the second.
        recurrent: of each recurrent layer the name of its kind, which tells its arithmetic, and the
            shapes and dtypes of its states.
    """

    model: str
    dtype: str
    layers: tuple[tuple[int, int, int], ...]
    recurrent: tuple[str, ...] = ()

    @classmethod
    def of(cls, state: ModelState, model: str) -> "KVFormat":
        """Raises `ValueError` where layers are of different dtypes."""
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
        """Of all layers."""
        item = torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()
        return sum(heads * (key + value) * item for heads, key, value in self.layers)


@dataclass(frozen=True, eq=False, kw_only=True)
class RowKV:
    """Of the tokens at positions `start .. start + count - 1`.

    Attributes:
        text: a digest of all tokens up to the last of them.
        data: [count * format.token_bytes], layer after layer, keys before values, each of them
            [count, kv_heads, width]. It may be read-only.
        state: of the recurrent layers behind the last of them; empty where another piece has it.
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
    """What a row has of the positions `start .. stop - 1`, copied.

    Args:
        committed: the row's tokens, [n].
        model: see `KVFormat`.
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
    """Appends what a row lacks of `kv`; what it has stays. Returns how many tokens were added.

    It takes all blocks for them before it writes.

    Args: see `export_row`.

    Raises:
        KVMismatchError: it is of another model or text, or does not follow what the row has.
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
    """Whether a row that has read `held` tokens may go on from `kv`. Raises `KVMismatchError`."""
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
    """Keys or values of each layer, [slots, kv_heads, width], and their part of the bytes."""
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
    """The memory of a contiguous tensor of the host, flat, not copied."""
    flat: Bytes = tensor.view(torch.uint8).numpy().reshape(-1)
    return flat


def _write(part: Tensor, data: Bytes) -> None:
    """Fills a contiguous piece of a store."""
    if part.device.type == "cpu":
        _bytes_of(part)[:] = data
        return
    host = torch.empty(part.shape, dtype=part.dtype)
    _bytes_of(host)[:] = data
    part.copy_(host)


def _digest(tokens: Ints) -> str:
    return hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=12).hexdigest()
