"""A checkpoint of safetensors that exists only while it is loaded.

Contract: little memory is used at a time: a model's file is written, part by part, into the cache,
from where `transformers` maps it, and is removed once it is loaded.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelpool.checkpoint.cache_dir import make_folder, remove_left
from modelpool.checkpoint.dtypes import DTYPE_NAMES

WEIGHTS = "model.safetensors"
_PREFIX = ".loading-"


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder in the cache's folder `parent`, and remove it; may raise `OSError`."""
    make_folder(parent)
    remove_left(parent, f"{_PREFIX}*")
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_weights(
    folder: Path,
    planned: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    parts: Callable[[str], Iterable[Tensor]],
) -> None:
    """Write tensors to the file of weights in `folder`.

    Args:
        folder: existing folder for the file.
        planned: dtype and shape of each tensor.
        parts: returns all values of a tensor, in any number of parts of any dtype; called once
            each.

    Raises:
        OSError: the disk lacks room; nothing is written then.
    """
    names = sorted(planned, key=lambda name: -planned[name][0].itemsize)  # widest first: aligned
    entries, start = dict[str, Any](), 0
    for name in names:
        dtype, shape = planned[name]
        end = start + math.prod(shape) * dtype.itemsize
        offsets = [start, end]
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": offsets}
        start = end
    free = shutil.disk_usage(folder).free
    if start > free:
        reason = f"{start / 1e9:.2f} GB while it is loaded, and {free / 1e9:.2f} GB are free"
        raise OSError(f"it takes {reason} in {folder.parent}; SPECROUTER_CACHE names another")
    head = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    head += b" " * (-len(head) % 8)
    with (folder / WEIGHTS).open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        for name in names:
            for part in parts(name):
                kept = part.to(planned[name][0]).contiguous().reshape(-1)
                stream.write(memoryview(kept.view(torch.uint8).numpy()))  # type: ignore[arg-type]
