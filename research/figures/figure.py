"""Figure: which cells it takes, what is drawn of them, and what is said beside it.

Contract: pure but for `draw`, which writes a picture. Intervals are of means over seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from research.figures.cell import Cell

Results = Mapping[str, Mapping[str, Any]]  # by the cell's key
Row = dict[str, Any]


@dataclass(frozen=True)
class Scope:
    """How much is run. `traces`: folder of the published ones; None: arrivals are drawn."""

    is_quick: bool = False
    seeds: int = 8
    requests: int = 400
    traces: str | None = None

    @property
    def all_seeds(self) -> range:
        return range(1 if self.is_quick else self.seeds)

    def pick(self, values: Sequence[Any], quick: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(quick if self.is_quick else values)


@dataclass(frozen=True)
class Axis:
    """What a picture shows: `x` is a field of cells, `y` figures of results with their labels;
    `panel`: fields of cells, a line of panels for each of their values; `line`: the field that
    tells a panel's lines apart."""

    x: str
    label: str
    y: tuple[tuple[str, str], ...] = (("attained", "share of requests in time"),)
    panel: tuple[str, ...] = ("machine",)
    line: str = "policy"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Attributes:
    cells: for a scope.
    axis: what is drawn.
    published: what the paper says of it, in words.
    assumed: what is ours, fitted, or unknown.
    """

    name: str
    title: str
    cells: Callable[[Scope], list[Cell]]
    axis: Axis
    published: str
    assumed: str

    @property
    def says(self) -> str:
        """The line under the picture."""
        return f"Published: {self.published} Ours: simulated. {self.assumed}"


def rows_of(figure: Figure, cells: Sequence[Cell], results: Results) -> list[Row]:
    """Means over seeds, by panel, x and policy."""
    groups: dict[tuple[str, Any, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        line = str(getattr(cell, figure.axis.line))
        group = (_panel(figure.axis, cell), getattr(cell, figure.axis.x), line)
        groups.setdefault(group, []).append(results[cell.key])
    found = []
    for (panel, x, policy), each in groups.items():
        row: Row = {"panel": panel, "x": x, "policy": policy}
        for name, _ in figure.axis.y:
            values = [one[name] for one in each if one[name] is not None]
            row[name] = fmean(values) if values else None
            row[f"{name}_of_seeds"] = values
        found.append(row)
    return found


def _panel(axis: Axis, cell: Cell) -> str:
    """`adaserve-llama70b, urgent_share 0.3`."""
    values = {name: getattr(cell, name) for name in axis.panel}
    return ", ".join(
        str(value) if isinstance(value, str) else f"{name} {value}"
        for name, value in values.items()
    )


def table(figure: Figure, rows: Sequence[Row]) -> str:
    """Of each panel: a line for every policy and x."""
    names = [name for name, _ in figure.axis.y]
    lines = [figure.title]
    for panel in dict.fromkeys(row["panel"] for row in rows):
        lines += [panel, f"  {'policy':20}{figure.axis.x:>16}" + "".join(f"{n:>24}" for n in names)]
        for row in (each for each in rows if each["panel"] == panel):
            values = "".join(f"{_number(row[name]):>24}" for name in names)
            lines.append(f"  {row['policy']:20}{row['x']!s:>16}{values}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def draw(figure: Figure, rows: Sequence[Row], path: Path) -> None:
    """A line of panels, one for each figure: lines over numbers, bars over names."""
    # Optional, and slow to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    panels = list(dict.fromkeys(row["panel"] for row in rows))
    picture = Picture(figsize=(5.0 * len(figure.axis.y) + 1.5, 3.4 * len(panels)))
    FigureCanvasAgg(picture)
    grid = picture.subplots(len(panels), len(figure.axis.y), squeeze=False)
    for line, name_of in zip(grid, panels, strict=True):
        own = [row for row in rows if row["panel"] == name_of]
        for axes, (name, label) in zip(line, figure.axis.y, strict=True):
            panel = _lines if all(isinstance(row["x"], int | float) for row in own) else _bars
            panel(axes, own, name)
            axes.set_xlabel(figure.axis.label)
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
            axes.set_title(name_of, fontsize=8)
        line[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    picture.suptitle(figure.title, fontsize=9)
    picture.tight_layout()
    picture.savefig(path, dpi=60, bbox_inches="tight", format="png")


def _policies(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def _lines(axes: Any, rows: Sequence[Row], name: str) -> None:
    for place, policy in enumerate(_policies(rows)):
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["x"])
        values = [float("nan") if row[name] is None else row[name] for row in own]
        shown = {"label": policy, "color": f"C{place % 10}", "marker": "osv^Dx"[place % 6]}
        axes.plot([row["x"] for row in own], values, **shown)


def _bars(axes: Any, rows: Sequence[Row], name: str) -> None:
    names, policies = list(dict.fromkeys(row["x"] for row in rows)), _policies(rows)
    width = 0.85 / len(policies)
    for place, policy in enumerate(policies):
        own = [row for row in rows if row["policy"] == policy]
        at = [names.index(row["x"]) + (place - (len(policies) - 1) / 2) * width for row in own]
        axes.bar(at, [row[name] or 0.0 for row in own], width, label=policy, color=f"C{place % 10}")
    axes.set_xticks(range(len(names)), names, fontsize=7)
