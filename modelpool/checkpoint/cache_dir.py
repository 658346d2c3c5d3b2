"""The cache folder of this program, and functions that find and remove what is of no more use.

Contract: files in the cache may have been damaged, cut or replaced. This is detected, and such
files may be removed. No function here blocks on a pipe.
"""

import hashlib
import os
import shutil
import stat
import time
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

_LEFT_S = 3600.0  # a file that was not written to for so long was left behind
_CHUNK = 2**24  # bytes


def expanded(path: str | Path) -> Path:
    """Return the path with the user's home for `~`, unchanged if there is no such user."""
    return Path(os.path.expanduser(path))


def cache_dir() -> Path:
    """Return `$SPECROUTER_CACHE`, else `$XDG_CACHE_HOME/specrouter`, else `~/.cache/specrouter`.

    It need not exist. Raises `RuntimeError` if it would be in a home that cannot be found.
    """
    own, shared = os.environ.get("SPECROUTER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().absolute()
    if shared and Path(shared).is_absolute():  # the standard says to ignore a relative path
        return Path(shared) / "specrouter"
    return Path.home() / ".cache" / "specrouter"


def cached_name(folder: Path) -> str | None:
    """Return the id of the hub repository whose cached snapshot the folder is, else None."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/")


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, in place of a file of that name; may raise `OSError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # there is a file; another process may be creating the folder meanwhile
        with suppress(OSError):
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Remove a file, a folder with all its content, or any other path; may raise `OSError`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def remove_left(folder: Path, pattern: str) -> None:
    """Remove what killed processes have left behind, as far as possible."""
    with suppress(OSError):
        for path in folder.glob(pattern):
            with suppress(OSError):
                if time.time() - _last_written_s(path) > _LEFT_S:
                    remove(path)


def checksum(file: Path) -> tuple[int, int]:
    """Return size and CRC-32 of a regular file; takes about 0.3 s per gigabyte.

    Raises `OSError`.
    """
    size, crc = 0, 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def is_regular(path: Path) -> bool:
    """Return whether the path is a regular file, not a pipe or another special file.

    Raises `OSError` if there is nothing.
    """
    return stat.S_ISREG(path.stat().st_mode)


def _last_written_s(path: Path) -> float:
    inside = path.iterdir() if path.is_dir() and not path.is_symlink() else ()
    times_s: list[float] = [one.lstat().st_mtime for one in (path, *inside)]
    return max(times_s)


@cache
def package_sources() -> str:
    """Return a hash of this package's sources: what was kept before a change is not used after."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*")):
        if file.suffix in (".py", ".c", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
