"""The files that a benchmark leaves behind.

Contract: what could not be written is refused before anything is measured. What fails all the same
is a `FileNotWrittenError`, after the result was printed.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelpool.errors import ConfigError

STDOUT = Path("-")


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


def write_outputs(document: Mapping[str, Any], text: str, path: Path | None) -> None:
    """Print the text, and write the document where it is asked for; stderr tells that path.

    Args:
        path: of the document; `STDOUT` prints it as the last line.

    Raises:
        FileNotWrittenError: after the document was printed instead.
    """
    line = json.dumps(document)
    try:
        print(text, flush=True)
        if path == STDOUT:
            print(line, flush=True)
    finally:  # also where stdout was closed early
        if path is not None and path != STDOUT:
            _write(line, path)


def _write(line: str, path: Path) -> None:
    try:
        path.write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        print(line, flush=True)  # what was measured may have taken hours
        reason = error.strerror or str(error)
        raise FileNotWrittenError(f"cannot write {path}: {reason}") from error
    print(f"wrote {path}", file=sys.stderr)
