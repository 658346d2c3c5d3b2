"""Trial of whether a token has the same bits in any batch, made when a target is loaded.

Contract: attention sums in one order for any pack, tree and number of threads, and products of
integers are exact. Everything else that a forward calls, above all products of torch and oneDNN, is
tried as a whole: a short text is read in one pack and token by token, in chunks of many sizes,
beside other rows, along a tree among siblings, and with one thread. A model that keeps its bits in
the trial may still lose them at a size that was not tried. If bits change, small layers that were
left as they are get packed (`linear`), and everything is tried again. The verdict is cached,
because the passes take seconds for a large model.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelpool.checkpoint.cache_dir import cache_dir
from modelpool.checkpoint.json_cache import JsonCache
from modelpool.errors import UnsupportedModelError
from modelpool.fast.direct_forward import direct_forward_of
from modelpool.fast.model_key import computing_facts, key_of
from modelpool.packed_model import PackedModel
from modelpool.probe import ProbeView

logger = logging.getLogger(__name__)

PACK, BATCH, TREE, THREADS, UNTRIED = "pack sizes", "batches", "trees", "threads", "not tried"
MOST_TOKENS = 32  # of a pack that may run on one thread, after the trial

_SIZES = (1, 2, 3, 5, 8, 16)
_TOKENS = sum(_SIZES)  # tokens of the text
_Pack = Sequence[tuple[int, int]]  # for each row: first position and the one after the last
# The reference for the others: most of the text in one pack, its end token by token.
_ALONE: Sequence[_Pack] = [[(0, 26)], *([(at, at + 1)] for at in range(26, _TOKENS))]
_CHUNKS: Sequence[_Pack] = [[span] for span in pairwise(accumulate(_SIZES, initial=0))]
_LONG: Sequence[_Pack] = [[(0, 33)], [(33, _TOKENS)]]
_BATCHES: Sequence[_Pack] = [
    *([(0, 9), (0, 2), (0, 16)], [(9, 10), (2, 3), (16, 21)], [(10, 11), (3, _TOKENS), (21, 22)]),
    [(0, _TOKENS)] * 3,
]
_TREE_AT, _PARENTS = 20, (-1, -1, 0, 0, 3, 1, 4, 4)
_OF_TEXT = [0, 3, 4, 7]  # nodes with the tokens of the text; the others have different ones


@dataclass(frozen=True)
class BitVerdict:
    """Result of a trial.

    Attributes:
        depends_on: what changes bits, if anything.
        is_packed: True if all layers had to be packed for this result.
    """

    depends_on: str | None
    is_packed: bool = False

    @classmethod
    def of_json(cls, kept: Any) -> "BitVerdict":
        """Return the verdict that `to_json` has made; raise an exception for anything else."""
        depends_on, is_packed = kept["depends_on"], kept["is_packed"]
        if not isinstance(is_packed, bool) or depends_on not in (None, PACK, BATCH, TREE, THREADS):
            raise ValueError("no verdict")
        return cls(depends_on, is_packed)

    def to_json(self) -> Any:
        return {"depends_on": self.depends_on, "is_packed": self.is_packed}


def settle_bits(model: PackedModel, directory: Path, may_pack: bool) -> str | None:
    """Return what the bits of a CPU target depend on; pack all its layers if that changes it.

    `THREADS` does no harm to a model that always has the same number of threads. The other results
    are logged as warnings. Raises `UnsupportedModelError`, like `PackedModel.pack_weights`.
    """
    if model.dtype == torch.float64:  # its last bits do not change the chosen token
        return THREADS
    said = "texts may differ in last bits between batches"
    try:
        found = _verdict(model, directory, may_pack)
    except UnsupportedModelError:
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        logger.warning("%s: %s: that could not be tried: %s", model.name, said, why)
        return UNTRIED
    if found not in (None, THREADS):
        logger.warning("%s: %s: they depend on %s", model.name, said, found)
    return found


def _verdict(model: PackedModel, directory: Path, may_pack: bool) -> str | None:
    dtypes = sorted({str(layer.dtype) for layer in model.kv_layers.values()})
    key = key_of(model, directory, may_pack, dtypes, *computing_facts())
    cache = JsonCache(cache_dir() / "bits", "verdict")
    known = cache.load(key, BitVerdict.of_json)
    if known is not None:
        if known.is_packed:
            _pack_all(model)
        return known.depends_on
    found = BitVerdict(bits_depend_on(model))
    if found.depends_on not in (None, THREADS) and may_pack and _pack_all(model):
        found = BitVerdict(bits_depend_on(model), is_packed=True)
    cache.store(key, found.to_json())
    return found.depends_on


def _pack_all(model: PackedModel) -> bool:
    """Pack small layers too; return False if there were none."""
    direct, model.shortcut = model.shortcut, None  # it calls the layers from before packing
    is_packed = model.pack_weights(every=True) > 0
    model.shortcut = direct_forward_of(model) if is_packed and direct is not None else direct
    return is_packed


def bits_depend_on(model: PackedModel) -> str | None:
    """Return the first of `PACK`, `BATCH`, `TREE` and `THREADS` that changes bits, or None.

    The trial takes about 30 passes, and fewer of a model whose passes are all in the C library: its
    orders of sums are stated, so only a wrong compiler or CPU is to be found.
    """
    if model.max_positions < _TOKENS:
        return THREADS
    tokens = (torch.arange(_TOKENS) * 7919 + 11) % model.vocab_size
    with torch.inference_mode():
        expected = torch.cat(_read(model, tokens, _ALONE))
        trials = [(PACK, _CHUNKS), (BATCH, _BATCHES[:-1])]
        if not model.is_portable:
            trials += [(PACK, _LONG), (BATCH, _BATCHES[-1:])]
        for name, packs in trials:
            if not _keeps(model, tokens, expected, packs):
                return name
        if not model.recurrent_layers and not _keeps_in_tree(model, tokens, expected):
            return TREE
        if model.is_portable:
            return None
        threads, model.threads = model.threads, 1
        try:
            return None if _keeps(model, tokens, expected, _CHUNKS) else THREADS
        finally:
            model.threads = threads


def _keeps(model: PackedModel, tokens: Tensor, expected: Tensor, packs: Sequence[_Pack]) -> bool:
    return all(
        torch.equal(logits, torch.cat([expected[slice(*span)] for span in spans]))
        for spans, logits in zip(packs, _read(model, tokens, packs), strict=True)
    )


def _keeps_in_tree(model: PackedModel, tokens: Tensor, expected: Tensor) -> bool:
    view = ProbeView(model.device, _TOKENS, model.kv_layers)
    _forward(model, view, tokens, [(0, _TREE_AT)])
    positions = torch.from_numpy(view.begin_tree(_TREE_AT, _PARENTS))
    nodes = (tokens[positions] + 1) % model.vocab_size
    nodes[_OF_TEXT] = tokens[positions[_OF_TEXT]]
    logits = model.forward(nodes, positions, view, torch.arange(len(nodes))).logits
    return torch.equal(logits[_OF_TEXT], expected[positions[_OF_TEXT]])


def _read(model: PackedModel, tokens: Tensor, packs: Sequence[_Pack]) -> list[Tensor]:
    """Return the logits of each pack; every row reads the text from its beginning."""
    view = ProbeView(model.device, _TOKENS, model.kv_layers, max(map(len, packs)))
    return [_forward(model, view, tokens, spans) for spans in packs]


def _forward(model: PackedModel, view: ProbeView, tokens: Tensor, spans: _Pack) -> Tensor:
    view.begin_pack(spans)
    positions = torch.cat([torch.arange(*span) for span in spans])
    index = torch.arange(len(positions))
    return model.forward(tokens[positions], positions, view, index).logits
