"""Folders of the cache, each written once.

Contract: a folder is written under another name and renamed, so any number of processes may write
it at once; the last to finish discards its copy. The checksums of its files are stored beside them
and are checked each time: a damaged folder is written again, with a warning. What a killed process
has left behind is removed after an hour.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from modelpool.checkpoint.cache_dir import checksum, is_regular, make_folder, remove_left

logger = logging.getLogger(__name__)

CHECKSUMS = "checksums.json"
_UNFINISHED = ".unfinished-"


def cached_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return `folder`; if it is missing, `write` fills it under another name first.

    Raises `OSError`, and what `write` raises.
    """
    _remove_damaged(folder)
    if not folder.is_dir():
        _write(folder, write)
    return folder


def _remove_damaged(folder: Path) -> None:
    """Remove a damaged folder; may raise `OSError`.

    Other processes may have its files open, which does no harm.
    """
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


def _write(folder: Path, write: Callable[[Path], None]) -> None:
    make_folder(folder.parent)
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
    try:
        write(unfinished)
        write_checksums(unfinished)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in the folder; may raise `OSError`."""
    found = {file.name: checksum(file) for file in sorted(_files(folder))}
    (folder / CHECKSUMS).write_text(json.dumps(found, indent=1))


def damage(folder: Path) -> str | None:
    """Return the damage of a folder since `write_checksums`, or None; reads all its files."""
    try:
        known = json.loads(_read(folder / CHECKSUMS))
        if not isinstance(known, dict) or not known:
            return f"{CHECKSUMS} names no files"
        for file in _files(folder):
            if file.name not in known:
                return f"{file.name} does not belong there"
        for name, facts in known.items():
            file = folder / name
            if not is_regular(file) or file.stat().st_size != facts[0]:
                return f"{name} has another size"
            if list(checksum(file)) != facts:
                return f"{name} has another checksum"
    except FileNotFoundError as error:
        return f"there is no {Path(error.filename).name}"
    except Exception as error:  # the file of checksums may hold anything
        return f"{type(error).__name__}: {error}"
    return None


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.name != CHECKSUMS and file.name[0] != "."]


def _read(file: Path) -> str:
    if not is_regular(file):
        raise ValueError(f"{file.name} is no file")
    return file.read_text(encoding="utf-8")
