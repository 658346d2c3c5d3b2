"""The table and the plot, from a made-up document."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from modelpool.errors import ConfigError
from specrouter.bench.plots import check_plot, write_chains_plot
from specrouter.bench.tables import chains_table


def ratio(value: float) -> dict[str, float]:
    return {"median": value, "low": 0.9 * value, "high": 1.1 * value}


def row(speed: float, **more: Any) -> dict[str, Any]:
    return {
        "tokens_per_s": ratio(10 * speed),
        "requests_per_s": ratio(speed),
        "eaf_tpot": ratio(speed + 0.5),
        "over": {"off": ratio(speed)},
        "tokens_per_s_by_category": {"code": ratio(10 * speed), "prose": ratio(10 * speed - 5)},
        "over_by_category": {"code": {"off": ratio(speed)}, "prose": {"off": ratio(speed - 0.5)}},
        "acceptance_length": None,
        "distinct_4grams": 0.9,
        **more,
    }


def batch(best: str, *chains: str) -> dict[str, Any]:
    rows = {name: row(2.0, control_share=0.125) for name in chains}
    return {
        "aliases": {"tuned": best},
        "shapes": {name: {"depth": 4, "width": 2} for name in chains},
        "left_out": {},
        "contenders": {"off": row(1.0), **rows, "adaptive": row(2.5)},
    }


DOCUMENT = {
    "conditions": {
        "cpu": "A processor",
        "gpu": None,
        "threads": 2,
        "dtype": "bfloat16",
        "temperature": 1.0,
        "models": {
            "small": {"parameters": 1_100_000, "is_inflated": False},
            "twin": {"parameters": 201_900_000, "is_inflated": True, "weights": "int8"},
            "big": {"parameters": 201_900_000, "is_inflated": True, "weights": "plain"},
        },
    },
    "batches": {"1": batch("a>big", "a>big", "b>big"), "4": batch("b>big", "b>big")},
}


def test_table_has_every_contender_of_every_batch() -> None:
    text = chains_table(DOCUMENT)
    assert "small 1.1M, twin 201.9M int8 (inflated), big 201.9M (inflated)" in text
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("batch")] == ["batch 1", "batch 4"]
    adaptive = next(line for line in lines if line.startswith("adaptive"))
    assert adaptive.split()[1:6] == ["25.0", "2.50", "2.50", "2.25-2.75", "3.00"]
    tuned = next(line for line in lines if line.startswith("a>big (tuned)"))
    assert tuned.split()[-2:] == ["90%", "12%"]
    assert "  a>big (tuned): depth 4, width 2" in lines
    for heading, row in (("tokens/s", ["25.0", "20.0"]), ("over off", ["2.50", "2.00"])):
        start = next(
            i for i, line in enumerate(lines) if line.startswith(f"{heading}, by category")
        )
        adaptive = next(line for line in lines[start:] if line.startswith("adaptive"))
        assert adaptive.split() == ["adaptive", *row]


def test_plot_says_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    seen: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: seen.append(self))
    write_chains_plot(DOCUMENT, tmp_path / "plot.png")
    axes = seen[0].axes[0]
    for part in ("big 201.9M (inflated)", "A processor, threads: 2", "bfloat16", "temperature 1"):
        assert part in axes.get_title()
    # a>big is measured at batch 1 only, where it is tuned; target-only is the line at 1.
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(names) == ["adaptive", "b>big", "tuned"]
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers
               if hasattr(bars, "patches")}  # fmt: skip
    assert heights["adaptive"] == [2.5, 2.5]


def test_plot_without_matplotlib_is_refused_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"--plot: .*pip install specrouter\[bench\]"):
        check_plot(Path("plot.png"))
