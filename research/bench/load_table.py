"""The table of policies under load, from its JSON document."""

from collections.abc import Iterator, Mapping
from typing import Any

from specrouter.bench.conditions import model_sizes, number, percent
from specrouter.bench.load import load_rows


def load_table(document: Mapping[str, Any]) -> str:
    """Ratios are over the best baseline; that of TTFT (p99) over target-only. EAF: target-only's
    mean TPOT over the policy's."""
    lines = [_load_title(document["conditions"])]
    for point in document["points"]:
        lines += ["", describe(point), *_rows(point["policies"])]
        lines += _attained_by_category(point["policies"])
    return "\n".join(lines)


def _rows(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """With the ratios of each policy."""
    ratios = list(next(iter(rows.values()))["over"])
    head, *lines = load_rows(rows)
    yield head + "".join(f"{f'{name} x':>13}" for name in ratios)
    for line, row in zip(lines, rows.values(), strict=True):
        yield line + "".join(f"{number(row['over'][name]):>13}" for name in ratios)


def describe(point: Mapping[str, Any]) -> str:
    """`scale 2: 1.80 requests/s`."""
    return f"scale {point['scale']:g}: {number(point['requests_per_s'])} requests/s"


def _load_title(conditions: Mapping[str, Any]) -> str:
    models = model_sizes(conditions) if "models" in conditions else str(conditions["machine"])
    acceptance = conditions.get("simulated_acceptance")
    if acceptance is not None:
        models += f"\nSIMULATED, a best token accepted in {acceptance:.2f} of cases"
    return f"{models}\nbaseline latency {conditions['baseline_ms']:.2f} ms"


def _attained_by_category(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    categories = list(next(iter(rows.values()))["by_category"])
    if len(categories) < 2:
        return
    yield f"{'by category':16}" + "".join(f"{name:>30.29}" for name in categories)
    for name, row in rows.items():
        found = [row["by_category"][category] for category in categories]
        yield f"{name:16}" + "".join(f"{_attained(one):>30}" for one in found)


def _attained(one: Mapping[str, Any]) -> str:
    """Attainment and the median TPOT over the objective of a category."""
    objective = one["objective_ms"]
    wanted = "" if objective is None else f" of {objective:.1f}"
    return f"{percent(one['attainment'])} at {number(one['tpot_ms']['p50'])}{wanted} ms"
