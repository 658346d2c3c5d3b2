"""The files that a benchmark leaves behind.

Contract: what could not be written is refused before anything is measured. What fails all the same
is a `FileNotWrittenError`, after the result was printed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelpool.errors import ConfigError


class FileNotWrittenError(RuntimeError):
    """The result is on stdout, and not where it was wanted as well."""


def check_writable(argument: str, path: Path) -> None:
    """Raises `ConfigError` for `argument` where a file cannot be written."""
    if path.is_dir():
        raise ConfigError(argument, f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(argument, f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(argument, f"{path} cannot be written")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within it, an `OSError` becomes a `FileNotWrittenError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileNotWrittenError(f"cannot write {path}: {reason}") from error
