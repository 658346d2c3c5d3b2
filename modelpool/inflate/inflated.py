"""Inflated checkpoints, each written once into the cache (`inflate_to` of a pool's member).

Contract: that of `cached_folder`. The name depends on all that the content depends on: source,
size, dtype.

A separate process does the work: torch in this thread would start a second OpenMP pool, which slows
each later forward of the engine's thread.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from modelpool.checkpoint.cache_dir import cache_dir
from modelpool.checkpoint.cached_folder import cached_folder
from modelpool.checkpoint.dtypes import WIDTHS
from modelpool.config import Dtype
from modelpool.errors import ConfigError
from modelpool.inflate.inflate import COPIED, FAULTS, inflated_shape

logger = logging.getLogger(__name__)

_FORMAT = "1"  # changes when the same arguments would give other content
_HASHED_BYTES = 64 * 2**20  # of larger files only size and time of change count
_PROGRAM = "from modelpool.inflate.inflate import main; main()"


def inflated_source(source: Path, min_parameters: int, *, dtype: Dtype, field: str) -> Path:
    """Return the folder of `source` inflated to `min_parameters` or more; write it if missing.

    `dtype`: dtype of the stored weights; "auto" is the source's. `field` is the member's place,
    such as `pool.models[1]`. Raises `ConfigError` for `{field}.inflate_to`.
    """
    try:
        written_dtype = _stored_dtype(source) if dtype == "auto" else dtype
        shape = inflated_shape(source, min_parameters)
        folder = cache_dir() / "inflated" / _name(source, min_parameters, written_dtype)

        def write(unfinished: Path) -> None:
            size = shape.parameter_count * WIDTHS[written_dtype]
            what = f"{source.name} to {shape.parameter_count / 1e6:.1f}M parameters"
            logger.info("inflating %s: writing %.2f GB to %s", what, size / 1e9, folder)
            _inflate_elsewhere(source, unfinished, min_parameters, written_dtype)

        return cached_folder(folder, write)
    except ConfigError as error:
        raise ConfigError(f"{field}.inflate_to", error.reason) from error
    except FAULTS as error:
        reason = f"cannot inflate {str(source)!r}: {error}"
        raise ConfigError(f"{field}.inflate_to", reason) from error


def _inflate_elsewhere(source: Path, out: Path, min_parameters: int, dtype: str) -> None:
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    theirs, ours = os.pipe()  # the process reads it, so it ends with this one in any case
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(source), str(out), str(min_parameters), dtype],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=theirs,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(theirs)
        os.close(ours)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the process that writes it ended with {done.returncode}: {last}")


def _stored_dtype(source: Path) -> str:
    config = json.loads((source / "config.json").read_text())
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in WIDTHS:
        raise ValueError(f"it is stored in {dtype}; say which dtype to inflate it in")
    return dtype


def _name(source: Path, min_parameters: int, dtype: str) -> str:
    digest = hashlib.sha256(_FORMAT.encode())
    patterns = ("config.json", "*.safetensors", *COPIED)
    for file in sorted({file for pattern in patterns for file in source.glob(pattern)}):
        facts = file.stat()
        digest.update(f"{file.name} {facts.st_size} ".encode())
        if facts.st_size > _HASHED_BYTES:
            digest.update(str(facts.st_mtime_ns).encode())
        else:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return f"{source.name}-{min_parameters}-{dtype}-{digest.hexdigest()[:16]}"
