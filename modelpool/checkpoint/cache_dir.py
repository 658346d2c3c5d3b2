"""Where this program keeps what it can make again, and how it tells what is no more of use there.

Contract: what lies in the cache may have been damaged, cut or replaced by anything: it is told
apart from what was written, and may be taken away. Nothing here blocks on a pipe.
"""

import os
import shutil
import stat
import time
import zlib
from contextlib import suppress
from pathlib import Path

_LEFT_S = 3600.0  # what has not been written to for so long was left behind
_CHUNK = 2**24  # bytes


def expanded(path: str | Path) -> Path:
    """With a user's home for `~`; as it stands where there is no such user."""
    return Path(os.path.expanduser(path))


def cache_dir() -> Path:
    """`$SPECROUTER_CACHE`, else `$XDG_CACHE_HOME/specrouter`, else `~/.cache/specrouter`.

    It need not exist. Raises `RuntimeError` where it would be in a home that cannot be found.
    """
    own, shared = os.environ.get("SPECROUTER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().absolute()
    if shared and Path(shared).is_absolute():  # a relative one is to be ignored, says its standard
        return Path(shared) / "specrouter"
    return Path.home() / ".cache" / "specrouter"


def cached_name(folder: Path) -> str | None:
    """The id of a hub's repository whose snapshot in its local cache this is; else None."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/")


def make_folder(folder: Path) -> None:
    """With its parents, in place of a file of that name. Raises `OSError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # no folder; another process may be putting one there meanwhile
        with suppress(OSError):
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """A file, a folder with all that is in it, or whatever it is. Raises `OSError`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def remove_left(folder: Path, pattern: str) -> None:
    """What killed processes have left behind, as far as it can be removed."""
    with suppress(OSError):
        for path in folder.glob(pattern):
            with suppress(OSError):
                if time.time() - _last_written_s(path) > _LEFT_S:
                    remove(path)


def checksum(file: Path) -> tuple[int, int]:
    """Size and CRC-32 of a regular file: some 0.3 s for each gigabyte. Raises `OSError`."""
    size, crc = 0, 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def is_regular(path: Path) -> bool:
    """A file, not a pipe or what else is opened like one. Raises `OSError` where nothing is."""
    return stat.S_ISREG(path.stat().st_mode)


def _last_written_s(path: Path) -> float:
    inside = path.iterdir() if path.is_dir() and not path.is_symlink() else ()
    times_s: list[float] = [one.lstat().st_mtime for one in (path, *inside)]
    return max(times_s)
