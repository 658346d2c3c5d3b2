"""JsonCache: small facts that can be found again, kept on disk for the next start.

Contract: no method fails. If a file cannot be read, is not what was written, or is something else
than a file, there is a warning, and the next file replaces it.
"""

import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from modelpool.checkpoint.cache_dir import is_regular, make_folder, remove, remove_left

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_BYTES = 2**20


class JsonCache:
    """Cache with one file per key in a folder, which need not exist.

    `what` names its content in messages.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self.folder = folder
        self._what = what

    def load(self, key: str, parse: Callable[[Any], T]) -> T | None:
        """Return the parsed facts, or None if there are none or `parse` raises.

        If there is a file, a warning gives the reason.
        """
        path = self._path(key)
        try:
            return parse(self._read(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            kind = type(error).__name__
            logger.warning("ignored the %s in %s: %s: %s", self._what, path, kind, error)
            return None

    def store(self, key: str, facts: Any) -> None:
        """Write the facts; readers see the old file or the new one, never a part."""
        path = self._path(key)
        try:
            make_folder(self.folder)
            remove_left(self.folder, ".*.tmp")
            if path.is_dir():
                remove(path)
            _write(path, json.dumps({"crc32": _crc32(facts), self._what: facts}, indent=1))
        except OSError as error:
            logger.warning("cannot keep %s in %s: %s", self._what, path, error)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _read(self, path: Path) -> Any:
        if not is_regular(path):  # reading a pipe would wait
            raise ValueError("not a file")
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("too large")
        content = json.loads(path.read_text(encoding="utf-8"))
        facts = content[self._what]
        if content["crc32"] != _crc32(facts):
            raise ValueError("not as they were written")
        return facts


def _write(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _crc32(facts: Any) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())
