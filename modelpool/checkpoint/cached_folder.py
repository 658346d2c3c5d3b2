"""Folders of the cache, each written once.

Contract: a folder is written under another name and renamed, so any number of processes may ask at
once; the last to finish throws its copy away. Its files' checksums lie beside them and are read
each time: a folder that is damaged is made anew, with a warning. What a killed process has left
behind goes after an hour.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from modelpool.checkpoint.cache_dir import make_folder, remove_left
from modelpool.checkpoint.checksums import damage, write_checksums

logger = logging.getLogger(__name__)

_UNFINISHED = ".unfinished-"


def cached_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """`folder`, which `write` has filled under another name if it was not there.

    Raises `OSError`, and what `write` raises.
    """
    _remove_damaged(folder)
    if not folder.is_dir():
        _write(folder, write)
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
