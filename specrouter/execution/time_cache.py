"""TimeCache: the profiles of models, kept on disk for the next start.

Contract: nothing here fails. Whatever lies where a file should be, one that cannot be read, or is
not what was written, costs a warning and a profile, whose file then takes its place.
"""

import json
import logging
import os
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from modelpool.checkpoint.cache_dir import is_regular, make_folder, remove, remove_left
from specrouter.profile.time_regression import TimeRegression

logger = logging.getLogger(__name__)

_MOST_BYTES = 2**20


class TimeCache:
    """One file per key in a folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str) -> TimeRegression | None:
        """None where nothing of use is kept; the warning says why, if there is a file."""
        path = self._path(key)
        try:
            times = TimeRegression.from_json(_read(path))
            times.curve()  # of what can be read and makes no sense
            return times
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            logger.warning("ignored the times in %s: %s: %s", path, type(error).__name__, error)
            return None

    def store(self, key: str, times: TimeRegression) -> None:
        """Readers see the old file or the new one, never a part."""
        path = self._path(key)
        try:
            make_folder(self.folder)
            remove_left(self.folder, ".*.tmp")
            if path.is_dir():
                remove(path)
            _write(path, times.to_json())
        except OSError as error:
            logger.warning("cannot keep times in %s: %s", path, error)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def _read(path: Path) -> Any:
    if not is_regular(path):  # reading a pipe would wait
        raise ValueError("not a file")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError("too large")
    content = json.loads(path.read_text(encoding="utf-8"))
    times = content["times"]
    if content["crc32"] != _crc32(times):
        raise ValueError("not as they were written")
    return times


def _write(path: Path, times: Any) -> None:
    text = json.dumps({"crc32": _crc32(times), "times": times}, indent=1)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _crc32(times: Any) -> int:
    return zlib.crc32(json.dumps(times, sort_keys=True).encode())
