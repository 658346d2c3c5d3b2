"""The table of chains, from a made-up document."""

from __future__ import annotations

from typing import Any

from specrouter.bench.tables import chains_table


def ratio(value: float) -> dict[str, float]:
    return {"median": value, "low": 0.9 * value, "high": 1.1 * value}


def row(speed: float, **more: Any) -> dict[str, Any]:
    return {
        "tokens_per_s": ratio(10 * speed),
        "requests_per_s": ratio(speed),
        "tpot_ms": ratio(20 / speed),
        "over": {"off": ratio(speed), "peer": ratio(speed / 4)},
        "tokens_per_s_by_category": {"code": ratio(10 * speed), "prose": ratio(10 * speed - 5)},
        "over_by_category": {"code": {"off": ratio(speed)}, "prose": {"off": ratio(speed - 0.5)}},
        "acceptance_length": None,
        "distinct_4grams": 0.9,
        **more,
    }


def batch(*chains: str) -> dict[str, Any]:
    rows = {name: row(2.0, control_share=0.125) for name in chains}
    return {"notes": ["a note"], "contenders": {"off": row(1.0), **rows, "adaptive": row(2.5)}}


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
    "batches": {"1": batch("a>big", "b>big"), "4": batch("b>big")},
}


def test_table_has_every_contender_of_every_batch() -> None:
    text = chains_table(DOCUMENT)
    assert "small 1.1M, twin 201.9M int8 (inflated), big 201.9M (inflated)" in text
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("batch")] == ["batch 1", "batch 4"]
    adaptive = next(line for line in lines if line.startswith("adaptive"))
    assert adaptive.split()[1:6] == ["25.0", "2.50", "2.50", "2.25-2.75", "8.00"]
    pair = next(line for line in lines if line.startswith("a>big"))
    assert pair.split()[-3:] == ["90%", "12%", "0.50"]
    assert "a note" in lines
    assert lines[4].endswith("over peer")
    for heading, row in (("tokens/s", ["25.0", "20.0"]), ("over off", ["2.50", "2.00"])):
        start = next(
            i for i, line in enumerate(lines) if line.startswith(f"{heading}, by category")
        )
        adaptive = next(line for line in lines[start:] if line.startswith("adaptive"))
        assert adaptive.split() == ["adaptive", *row]
