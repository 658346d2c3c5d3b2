"""A checkpoint with packed weights, as a plain one while it is loaded.

Contract: see `checkpoint.temporary`; values are rounded once, to the dtype that the model is kept
in.
"""

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelpool.checkpoint.block_values import StoredBlocks
from modelpool.checkpoint.cache_dir import cache_dir
from modelpool.checkpoint.dtypes import NAMED_DTYPES
from modelpool.checkpoint.footprint import read_config
from modelpool.checkpoint.headers import header_of, weight_files
from modelpool.checkpoint.packed_weights import PackedBlocks, packed_weights, plain_header
from modelpool.checkpoint.quantization import Packing, packing_of, unpacked_dtype
from modelpool.checkpoint.stored_tensors import StoredTensors
from modelpool.checkpoint.temporary import temporary_folder, write_weights


@dataclass(frozen=True)
class Unpacked:
    """A folder with the plain checkpoint, and facts about its packed weights.

    `blocks`: weights in 4 bits, by layer. `zero_biases`: biases of GPTQ's layers that are zero: old
    checkpoints have some that their models do not have.
    """

    folder: Path
    blocks: Mapping[str, StoredBlocks] = field(default_factory=dict)
    zero_biases: Collection[str] = ()


@contextmanager
def unpacked_checkpoint(folder: Path, dtype: str, trust_remote_code: bool) -> Iterator[Unpacked]:
    """Yield a plain checkpoint of `folder`, which is `folder` itself if nothing is packed.

    `dtype`: the one asked for. Raises `OSError`, `ValueError`, `KeyError`, `ConfigError`, and what
    safetensors raises.
    """
    packing = packing_of(read_config(folder, trust_remote_code))
    if packing is None:
        yield Unpacked(folder)
        return
    with temporary_folder(cache_dir() / "unpacked") as out:
        for code in folder.glob("*.py"):
            shutil.copy(code, out)
        own = _write_config(folder, out)
        kept = {"auto": own, "float64": "float32"}.get(dtype, dtype)
        yield _write(folder, out, packing, getattr(torch, kept))


def _write_config(folder: Path, out: Path) -> str:
    """Write the configuration of the plain model, and return the dtype that it is kept in."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config")
    own = "bfloat16"
    for part in (text if isinstance(text, dict) else {}, config):
        for name in ("quantization_config", "compression_config"):
            part.pop(name, None)
        said = [part.pop(name, None) for name in ("dtype", "torch_dtype")]
        own = unpacked_dtype(said[0] or said[1] or own)
        part["dtype"] = own
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return own


def _write(folder: Path, out: Path, packing: Packing, kept: torch.dtype) -> Unpacked:
    header = {
        name: entry for file in weight_files(folder) for name, entry in header_of(file).items()
    }
    packed = packed_weights(header, packing)
    planned = {
        name: (kept if name in packed else NAMED_DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in plain_header(header, packed).items()
    }

    tensor = StoredTensors(folder).__getitem__

    def parts(name: str) -> Iterable[Tensor]:
        return packed[name].rows(tensor) if name in packed else [tensor(name)]

    write_weights(out, planned, parts)
    layers = [one.layer for one in packed.values() if packing.stored == "gptq"]
    biases = {f"{layer}.bias" for layer in layers} & header.keys()
    return Unpacked(
        out,
        {one.layer: PackedBlocks(one, tensor) for one in packed.values() if one.has_blocks},
        {name for name in biases if not bool(tensor(name).any())},
    )
