"""The files that a benchmark leaves behind.

Contract: what could not be written is refused before anything is measured. What fails all the same
is a `FileNotWrittenError`, after the result was printed.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modelpool.errors import ConfigError

STDOUT = Path("-")

Draw = Callable[[Mapping[str, Any], Path], Iterable[Path]]


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


def write_outputs(
    document: Mapping[str, Any],
    text: str,
    json_path: Path | None,
    plot_path: Path | None = None,
    draw: Draw = lambda document, path: [],
) -> None:
    """The text on stdout, then what is asked for besides; stderr tells the files' paths.

    Args:
        json_path: of the document; `STDOUT` prints it as the last line.
        draw: writes the pictures of the document, and returns their paths.

    Raises:
        FileNotWrittenError: after all that could be written.
    """
    try:
        print(text, flush=True)
        if json_path == STDOUT:
            print(json.dumps(document), flush=True)
    finally:  # also where stdout was closed early
        if json_path is not None and json_path != STDOUT:
            _write_json(document, json_path)
        if plot_path is not None:
            with writing(plot_path):
                for path in draw(document, plot_path):
                    _tell(path)


def _write_json(document: Mapping[str, Any], path: Path) -> None:
    line = json.dumps(document)
    try:
        with writing(path):
            path.write_text(line + "\n", encoding="utf-8")
    except FileNotWrittenError:
        print(line, flush=True)  # what was measured may have taken hours
        raise
    _tell(path)


def _tell(path: Path) -> None:
    print(f"wrote {path}", file=sys.stderr)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within it, an `OSError` becomes a `FileNotWrittenError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileNotWrittenError(f"cannot write {path}: {reason}") from error
