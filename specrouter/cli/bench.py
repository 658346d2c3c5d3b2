"""What the benchmarks' commands have in common."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrouter.cli.arguments import complain

if TYPE_CHECKING:
    from specrouter.bench.progress import Progress


def add_outputs(parser: argparse.ArgumentParser, drawn: str) -> None:
    """What is written beside the table; stderr tells the paths."""
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help=f"draw {drawn}; needs matplotlib"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write all figures and the conditions; - prints them as the last line",
    )  # fmt: skip


def measured(
    measure: Callable[[Progress], Mapping[str, Any]], write: Callable[[Mapping[str, Any]], None]
) -> int:
    """Measures, shows what that is at, and writes the document. Returns the exit code."""
    from specrouter.bench.output_file import FileNotWrittenError
    from specrouter.bench.progress import Progress
    from specrouter.bench.sample import MeasurementError

    try:
        with Progress() as progress:
            document = measure(progress)
        write(document)
    except MeasurementError as error:
        print(f"specrouter: the measurement failed: {error}", file=sys.stderr)
        return 1
    except FileNotWrittenError as error:
        complain(error)
        return 1
    return 0


def options_from(options: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of a dataclass's fields."""
    names = {field.name for field in dataclasses.fields(options)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    given["fresh_times"] = bool(given["fresh_times"])
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return {**given, **lists}
