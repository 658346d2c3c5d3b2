"""Sweep: runs the cells of figures in several processes, and goes on where it was stopped.

Contract: every finished cell is a line of JSON in the file, written at once; a cell whose key is
there already is not run. A line that was cut off when the program was stopped is dropped.
"""

import json
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelpool.errors import ConfigError
from research.figures.cell import Cell, run_cell
from specrouter.progress import Progress

Result = Mapping[str, Any]


def finished(file: Path) -> dict[str, Result]:
    """Results by key."""
    if not file.is_file():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    return {key: result for key, result in map(_parsed, lines) if key is not None}


def run_sweep(cells: Iterable[Cell], file: Path, processes: int) -> dict[str, Result]:
    """Results of all cells, by key. Raises `ConfigError` where the file cannot be written."""
    known = finished(file)
    wanted = list({cell.key: cell for cell in cells}.values())
    left = [cell for cell in wanted if cell.key not in known]
    try:
        with file.open("a", encoding="utf-8") as lines:
            _end_last_line(file, lines)
            for cell, result in _run(left, processes):
                known[cell.key] = result
                lines.write(json.dumps({"key": cell.key, "result": result}) + "\n")
                lines.flush()
    except OSError as error:
        raise ConfigError("--out", f"cannot write {file}: {error.strerror}") from error
    return {cell.key: known[cell.key] for cell in wanted}


def _run(cells: Sequence[Cell], processes: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    progress = Progress("cells of figures")
    progress.expect(len(cells))
    with progress:
        for found in _results(cells, processes):
            yield found
            progress.step()


def _results(cells: Sequence[Cell], processes: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    if processes == 1 or len(cells) < 2:
        yield from map(_pair, cells)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(processes, len(cells))) as pool:
        yield from pool.imap_unordered(_pair, cells)


def _pair(cell: Cell) -> tuple[Cell, dict[str, Any]]:
    return cell, run_cell(cell)


def _parsed(line: str) -> tuple[str | None, Result]:
    try:
        found = json.loads(line)
        return str(found["key"]), found["result"]
    except (ValueError, KeyError, TypeError):
        return None, {}


def _end_last_line(file: Path, lines: Any) -> None:
    text = file.read_bytes()
    if text and not text.endswith(b"\n"):
        lines.write("\n")
