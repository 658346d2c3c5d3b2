"""The plots of a load benchmark, from its JSON document.

Contract: a PNG over the time of the first point's first round, in the file that is asked for, and
one beside it for each axis of the sweep that has several values (attainment and goodput along it,
the other axes at their first value).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class _Axis:
    """`setting` is what varies; `shown` what it is drawn as."""

    file: str
    setting: str
    shown: str
    label: str


_AXES = (
    _Axis("rate", "scale", "requests_per_s", "requests per second"),
    _Axis("urgent", "urgent_share", "urgent_share", "share of urgent requests"),
    _Axis("slo", "slo_scale", "slo_scale", "objectives, as a multiple of the trace's"),
)
PLOTS = tuple(axis.file for axis in _AXES)  # what the names of the files beside it end with
_FIGURES = (
    ("attainment", "share of requests in time"),
    ("goodput_tokens_per_s", "goodput: tokens per second of requests in time"),
)


def write_load_plots(document: Mapping[str, Any], path: Path) -> list[Path]:
    """The files that were written: `FILE.png`, and of sweeps `FILE-rate.png`, `-urgent.png`,
    `-slo.png`."""
    points = document["points"]
    written = [path]
    _draw_series(document, path)
    for axis in _AXES:
        along = _along(points, axis.setting)
        if len(along) > 1:
            written.append(plot_path(path, axis.file))
            _draw_axis(along, axis, written[-1])
    return written


def plot_path(path: Path, name: str | None) -> Path:
    """Of the picture that is asked for, or of one beside it."""
    return path if name is None else path.with_name(f"{path.stem}-{name}{path.suffix or '.png'}")


def running_over_time(requests: Sequence[Sequence[float]]) -> tuple[list[float], list[int]]:
    """Times at which a request is sent or ends, and how many are in the service from then on."""
    changes = sorted([(r[0], 1) for r in requests] + [(r[1], -1) for r in requests])
    times, counts = [0.0], [0]
    for at_s, change in changes:
        times.append(at_s)
        counts.append(counts[-1] + change)
    return times, counts


def _along(points: Sequence[Mapping[str, Any]], setting: str) -> list[Mapping[str, Any]]:
    """Those that differ from the first in this setting only, by it."""
    fixed = [axis.setting for axis in _AXES if axis.setting != setting]
    found = [point for point in points if all(point[n] == points[0][n] for n in fixed)]
    return sorted(found, key=lambda point: float(point[setting]))


def _draw_axis(points: Sequence[Mapping[str, Any]], axis: _Axis, path: Path) -> None:
    figure = _figure(11.0, 4.5)
    for place, (name, label) in enumerate(_FIGURES, 1):
        axes = figure.add_subplot(1, 2, place)
        for policy, style in _styles(points[0]["policies"]).items():
            values = [point["policies"][policy][name] for point in points]
            shown = [point[axis.shown] for point in points]
            axes.plot(shown, [float("nan") if v is None else v for v in values], **style)
        axes.set_xlabel(axis.label)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120, bbox_inches="tight", format="png")


def _draw_series(document: Mapping[str, Any], path: Path) -> None:
    """Above, requests in the service; below, each request's TPOT over its objective at its end.

    Of the first and the last policy that were asked for: more would hide each other.
    """
    names = list(document["series"])
    series = {name: document["series"][name] for name in dict.fromkeys((names[0], names[-1]))}
    figure = _figure(11.0, 6.5)
    above = figure.add_subplot(2, 1, 1)
    below = figure.add_subplot(2, 1, 2, sharex=above)
    for policy, style in _styles(series).items():
        requests = series[policy]
        times, counts = running_over_time(requests)
        above.step(times, counts, where="post", color=style["color"], label=policy, linewidth=1)
        judged = [(end_s, ratio) for _, end_s, ratio in requests if ratio is not None]
        if judged:
            below.scatter(*zip(*judged, strict=True), s=7, color=style["color"])
    below.axhline(1.0, color="black", linewidth=0.8)
    above.set_title(_title(document), fontsize=9)
    above.set_ylabel("requests running or waiting")
    below.set_ylabel("time per token / objective\n(below 1: in time)")
    below.set_xlabel("seconds")
    above.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120, bbox_inches="tight", format="png")


def _title(document: Mapping[str, Any]) -> str:
    conditions, point = document["conditions"], document["points"][0]
    named = (conditions.get(name) for name in ("server", "target", "machine"))
    where = [str(name) for name in named if name][:1]
    simulated = ["simulated"] if conditions.get("simulated_acceptance") is not None else []
    rate = f"{point['requests_per_s']:.2f} requests/s, {point['urgent_share']:.0%} of them urgent"
    return ", ".join([*where, *simulated, rate])


def _styles(policies: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {"label": name, "color": f"C{place % 10}", "marker": "osv^Dx"[place % 6]}
        for place, name in enumerate(policies)
    }


def _figure(width: float, height: float) -> Any:
    # Optional, and slow to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="tight")
    FigureCanvasAgg(figure)
    return figure
