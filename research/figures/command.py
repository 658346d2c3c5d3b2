"""`python -m research figures`: runs what figures need, and writes pictures, JSON and tables."""

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpool.errors import ConfigError
from research.figures.catalog import FIGURES
from research.figures.cell import Cell
from research.figures.figure import Figure, Results, Scope, draw, rows_of, table
from research.figures.sweep import run_sweep

CELLS = "cells.jsonl"


@dataclass(frozen=True, kw_only=True)
class FigureOptions:
    """Attributes:
    names: of figures; none: all.
    out: folder of pictures, JSON and finished cells; it is made where there is none.
    where: restrictions of cells, such as `policy=vllm,slo`.
    """

    names: Sequence[str] = ()
    out: Path = Path("figures")
    quick: bool = False
    seeds: int = 8
    requests: int = 400
    processes: int = 1
    traces: Path | None = None
    where: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in FIGURES:
                raise ConfigError("NAME", f"{name!r} is none of {', '.join(FIGURES)}")
        for argument, value, least in (
            ("--seeds", self.seeds, 1),
            ("--requests", self.requests, 2),
            ("--processes", self.processes, 1),
        ):
            if value < least:
                raise ConfigError(argument, f"must be at least {least}, not {value}")
        if self.traces is not None and not self.traces.is_dir():
            raise ConfigError("--traces", f"there is no folder {self.traces}")
        for text in self.where:
            name, equals, _ = text.partition("=")
            if not equals or name not in Cell.names():
                known = ", ".join(Cell.names())
                raise ConfigError("--where", f"{text!r} is no FIELD=VALUE of {known}")

    @property
    def figures(self) -> list[Figure]:
        return [FIGURES[name] for name in self.names or FIGURES]

    @property
    def scope(self) -> Scope:
        traces = None if self.traces is None else str(self.traces)
        return Scope(self.quick, self.seeds, self.requests, traces)

    def cells(self, figure: Figure) -> list[Cell]:
        """Raises `ConfigError` where the restrictions leave none."""
        found = figure.cells(self.scope)
        for text in self.where:
            name, _, values = text.partition("=")
            wanted = values.split(",")
            found = [cell for cell in found if _text(getattr(cell, name)) in wanted]
        if not found:
            raise ConfigError("--where", f"leaves nothing of {figure.name}")
        return found


def draw_figures(options: FigureOptions) -> None:
    """Prints a table of each figure. Raises `ConfigError`."""
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", f"cannot make {options.out}: {error.strerror}") from error
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("figures", "need matplotlib: pip install specrouter[bench]")
    if not os.access(options.out, os.W_OK):
        raise ConfigError("--out", f"{options.out} cannot be written")
    cells = {figure.name: options.cells(figure) for figure in options.figures}
    wanted = [cell for each in cells.values() for cell in each]
    results = run_sweep(wanted, options.out / CELLS, options.processes)
    for figure in options.figures:
        rows = rows_of(figure, cells[figure.name], results)
        _write(figure, rows, cells[figure.name], results, options)
        print(table(figure, rows))
        print(f"  {figure.says}\n")


def _write(
    figure: Figure,
    rows: Sequence[Mapping[str, Any]],
    cells: Sequence[Cell],
    results: Results,
    options: FigureOptions,
) -> None:
    draw(figure, [dict(row) for row in rows], options.out / f"{figure.name}.png")
    document = {
        "figure": figure.name,
        "title": figure.title,
        "published": figure.published,
        "assumed": figure.assumed,
        "arrivals": "drawn" if options.traces is None else "published traces",
        "rows": rows,
        "cells": [{"cell": json.loads(one.key), "result": results[one.key]} for one in cells],
    }
    text = json.dumps(document, indent=1)
    (options.out / f"{figure.name}.json").write_text(text + "\n", encoding="utf-8")


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
