"""Inflated checkpoints, each written once into the cache (`inflate_to` of a pool's member).

Contract: a folder is written under another name and renamed, so any number of processes may ask at
once; the last to finish throws its copy away. The name holds what the content depends on: source,
size, dtype. Its files' checksums lie beside them and are read each time: a folder that is damaged
is made anew, with a warning. What a killed process has left behind goes after an hour.

The work is done by another process: torch in this thread would start a second OpenMP pool, which
slows each later forward of the engine's thread.
"""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from modelpool.checkpoint.cache_dir import cache_dir, make_folder, remove_left
from modelpool.config import Dtype
from modelpool.errors import ConfigError
from modelpool.inflate.checksums import damage, write_checksums
from modelpool.inflate.inflate import COPIED, FAULTS, inflated_shape

logger = logging.getLogger(__name__)

_UNFINISHED = ".unfinished-"
_FORMAT = "1"  # changes when the same arguments would give another content
_HASHED_BYTES = 64 * 2**20  # of larger files only size and time of change count
_WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_PROGRAM = "from modelpool.inflate.inflate import main; main()"


def inflated_source(source: Path, min_parameters: int, *, dtype: Dtype, field: str) -> Path:
    """The folder of `source` inflated to at least `min_parameters`, made if it is not there.

    `dtype`: of the stored weights; "auto" is the source's. `field` is the member's place, such as
    `pool.models[1]`. Raises `ConfigError` for `{field}.inflate_to`.
    """
    try:
        written_dtype = _stored_dtype(source) if dtype == "auto" else dtype
        shape = inflated_shape(source, min_parameters)
        folder = cache_dir() / "inflated" / _name(source, min_parameters, written_dtype)
        _remove_damaged(folder)
        if not folder.is_dir():
            size = shape.parameter_count * _WIDTHS[written_dtype]
            logger.info(
                "inflating %s to %.1fM parameters: writing %.2f GB to %s",
                source.name,
                shape.parameter_count / 1e6,
                size / 1e9,
                folder,
            )
            _write(source, folder, min_parameters, written_dtype)
    except ConfigError as error:
        raise ConfigError(f"{field}.inflate_to", error.reason) from error
    except FAULTS as error:
        reason = f"cannot inflate {str(source)!r}: {error}"
        raise ConfigError(f"{field}.inflate_to", reason) from error
    return folder


def _remove_damaged(folder: Path) -> None:
    """Other processes may have its files open, which does them no harm. Raises `OSError`."""
    remove_left(folder.parent, f"{_UNFINISHED}*")
    if not os.path.lexists(folder):
        return
    reason = damage(folder)
    if reason is None:
        return
    logger.warning("%s is damaged (%s) and is made anew", folder, reason)
    away = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
    with suppress(FileNotFoundError):  # another process was first
        folder.rename(away / folder.name)
    shutil.rmtree(away, ignore_errors=True)


def _write(source: Path, folder: Path, min_parameters: int, dtype: str) -> None:
    make_folder(folder.parent)
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
    try:
        _inflate_elsewhere(source, unfinished, min_parameters, dtype)
        write_checksums(unfinished)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _inflate_elsewhere(source: Path, out: Path, min_parameters: int, dtype: str) -> None:
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    theirs, ours = os.pipe()  # which the process reads: it ends with this one, however that ends
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
    if dtype not in _WIDTHS:
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
