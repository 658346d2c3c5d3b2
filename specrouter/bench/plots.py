"""The plots of the benchmarks, from their JSON documents.

Of chains: speed over own target-only, by batch size. Of a load: a picture over the time of the
first point's first round, in the file that is asked for, and one beside it for each axis of the
sweep that has several values (attainment and goodput along it, the other axes at their first
value).
"""

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpool.errors import ConfigError
from specrouter.bench.output_file import check_writable
from specrouter.bench.tables import describe, model_sizes


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


def check_plot(path: Path) -> None:
    """Raises `ConfigError` for a plot that could not be written after the measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot", "needs matplotlib: pip install specrouter[bench]")
    check_writable("--plot", path)


def write_chains_plot(document: Mapping[str, Any], path: Path) -> list[Path]:
    """Bars in groups, one group per batch size; the whiskers are quartiles over rounds."""
    batches = document["batches"]
    groups = [_bars(result, batches.values()) for result in batches.values()]
    names = list(dict.fromkeys(name for bars in groups for name in bars))
    figure = _figure(max(8.0, 2 + 0.35 * len(names) * len(batches)), 5.5)
    axes = figure.add_subplot()
    bar_width = 0.85 / max(1, len(names))
    for place, name in enumerate(names):
        found = [(at, bars[name]) for at, bars in enumerate(groups) if name in bars]
        drawn = axes.bar(
            [at + (place - (len(names) - 1) / 2) * bar_width for at, _ in found],
            [bar["median"] for _, bar in found],
            bar_width,
            label=name,
            color=f"C{place % 10}",
            hatch=("", "//", "..")[place // 10 % 3],
            yerr=_quartiles([bar for _, bar in found]),
            capsize=2,
        )
        axes.bar_label(drawn, fmt="%.2f", fontsize=6, padding=2)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set_ylabel("speed-up (target alone = 1)")
    axes.set_title(_chains_title(document["conditions"]), fontsize=9)
    _save(figure, axes, path)
    return [path]


def _quartiles(bars: Sequence[Mapping[str, float]]) -> list[list[float]] | None:
    """Below and above the medians; None of a single round, which has none."""
    below = [bar["median"] - bar["low"] for bar in bars]
    above = [bar["high"] - bar["median"] for bar in bars]
    return [below, above] if any(below) or any(above) else None


def _bars(
    result: Mapping[str, Any], results: Collection[Mapping[str, Any]]
) -> dict[str, Mapping[str, float]]:
    """By the name in the legend. Target-only is left out: it would be 1 everywhere.

    What is called tuned may be another chain at another batch size, so that has a bar of its
    own; a chain has one too unless it would say the same, or was measured for that alone.
    """
    rows = result["contenders"]
    aliased = [set(one["aliases"].values()) for one in results]
    hidden = {"off", *set.union(*aliased)}
    hidden -= set.intersection(*(set(one["contenders"]) for one in results)) - {"off"}
    hidden |= set.intersection(*aliased)
    shown = {name: name for name in rows if name not in hidden} | result["aliases"]
    return {name: rows[contender]["over"]["off"] for name, contender in shown.items()}


def _chains_title(conditions: Mapping[str, Any]) -> str:
    machine = conditions["gpu"] or f"{conditions['cpu']}, threads: {conditions['threads']}"
    temperature = conditions["temperature"]
    sampling = f"temperature {temperature:g}" if temperature else "greedy"
    return f"{model_sizes(conditions)}\n{machine}, {conditions['dtype']}, {sampling}"


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
    _save(figure, axes, path)


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
    above.set_title(_load_title(document), fontsize=9)
    above.set_ylabel("requests running or waiting")
    below.set_ylabel("time per token / objective\n(below 1: in time)")
    below.set_xlabel("seconds")
    _save(figure, above, path)


def _load_title(document: Mapping[str, Any]) -> str:
    conditions = document["conditions"]
    named = (conditions.get(name) for name in ("server", "target", "machine"))
    where = [str(name) for name in named if name][:1]
    simulated = ["simulated"] if conditions.get("simulated_acceptance") is not None else []
    return ", ".join([*where, *simulated, describe(document["points"][0])])


def _styles(policies: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {"label": name, "color": f"C{place % 10}", "marker": "osv^Dx"[place % 6]}
        for place, name in enumerate(policies)
    }


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120, bbox_inches="tight", format="png")


def _figure(width: float, height: float) -> Any:
    # Optional, and slow to import.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="tight")
