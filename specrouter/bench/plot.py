"""The plot of a benchmark, from its JSON document: speed over own target-only, by batch size."""

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelpool.errors import ConfigError
from specrouter.bench.output_file import check_writable
from specrouter.bench.report import model_sizes


def check_plot(path: Path) -> None:
    """Raises `ConfigError` for a plot that could not be written after the measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot", "needs matplotlib: pip install specrouter[bench]")
    check_writable("--plot", path)


def write_plot(document: Mapping[str, Any], path: Path) -> None:
    """Bars in groups, one group per batch size; the whiskers are quartiles over rounds."""
    # Optional, and slow to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = document["batches"]
    groups = [_bars(result, batches.values()) for result in batches.values()]
    names = list(dict.fromkeys(name for bars in groups for name in bars))
    figure = Figure(figsize=(max(8.0, 2 + 0.35 * len(names) * len(batches)), 5.5))
    FigureCanvasAgg(figure)
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
    axes.set_title(_title(document["conditions"]), fontsize=9)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120, bbox_inches="tight", format="png")


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
    aside = {"off", *set.union(*aliased)}
    aside -= set.intersection(*(set(one["contenders"]) for one in results)) - {"off"}
    aside |= set.intersection(*aliased)
    shown = {name: name for name in rows if name not in aside} | result["aliases"]
    return {name: rows[contender]["over"]["off"] for name, contender in shown.items()}


def _title(conditions: Mapping[str, Any]) -> str:
    machine = conditions["gpu"] or f"{conditions['cpu']}, threads: {conditions['threads']}"
    temperature = conditions["temperature"]
    sampling = f"temperature {temperature:g}" if temperature else "greedy"
    return f"{model_sizes(conditions)}\n{machine}, {conditions['dtype']}, {sampling}"
