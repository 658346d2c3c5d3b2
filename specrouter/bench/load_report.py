"""The tables of a load benchmark, from its JSON document: one per point of the sweep."""

from collections.abc import Iterator, Mapping
from typing import Any

from specrouter.bench.report import model_sizes

_HEAD = (
    f"{'':16}{'attained':>9}{'violated':>9}{'goodput':>9}{'tokens/s':>9}{'req/s':>7}"
    f"{'TTFT ms p50/p95/p99':>21}{'TPOT ms p50/p95/p99':>21}{'e2e s p50/p95/p99':>21}"
    f"{'running':>9}{'accepted':>9}{'viol. x':>9}{'goodput x':>10}{'TTFT x':>8}{'EAF':>6}"
    f"{'errors':>7}"
)


def load_table(document: Mapping[str, Any]) -> str:
    """Ratios are over the best baseline; that of TTFT (p99) over target-only. EAF: target-only's
    mean TPOT over the policy's."""
    lines = [_title(document["conditions"])]
    for point in document["points"]:
        lines += ["", describe(point), _HEAD]
        lines += [_row(name, row) for name, row in point["policies"].items()]
        lines += _by_category(point["policies"])
    return "\n".join(lines)


def describe(point: Mapping[str, Any]) -> str:
    """`scale 2: 1.80 requests/s, 60% urgent, objectives x 1`."""
    return (
        f"scale {point['scale']:g}: {_number(point['requests_per_s'])} requests/s, "
        f"{point['urgent_share']:.0%} urgent, objectives x {point['slo_scale']:g}"
    )


def _title(conditions: Mapping[str, Any]) -> str:
    models = model_sizes(conditions) if "models" in conditions else _elsewhere(conditions)
    acceptance = conditions.get("simulated_acceptance")
    if acceptance is not None:
        models += f"\nSIMULATED, a best token accepted in {acceptance:.2f} of cases"
    return f"{models}\nbaseline latency {conditions['baseline_ms']:.2f} ms"


def _elsewhere(conditions: Mapping[str, Any]) -> str:
    return str(conditions.get("server") or conditions["machine"])


def _row(name: str, row: Mapping[str, Any]) -> str:
    over = row["over"]
    return (
        f"{name:16}{_percent(row['attainment']):>9}{row['violations']:>9g}"
        f"{row['goodput_tokens_per_s']:9.1f}{row['tokens_per_s']:9.1f}{row['requests_per_s']:7.2f}"
        f"{_percentiles(row['ttft_ms']):>21}{_percentiles(row['tpot_ms']):>21}"
        f"{_seconds(row['e2e_ms']):>21}"
        f"{row['mean_running']:9.1f}{_number(row['acceptance_length']):>9}"
        f"{_number(over['violations']):>9}{_number(over['goodput']):>10}"
        f"{_number(over['ttft_p99']):>8}{_number(over['eaf_tpot']):>6}{row['errors']:>7g}"
    )


def _by_category(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
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
    return f"{_percent(one['attainment'])} at {_number(one['tpot_ms']['p50'])}{wanted} ms"


def _percentiles(values: Mapping[str, float | None]) -> str:
    return "/".join("-" if value is None else f"{value:.0f}" for value in values.values())


def _seconds(values_ms: Mapping[str, float | None]) -> str:
    return "/".join("-" if ms is None else f"{ms / 1000:.1f}" for ms in values_ms.values())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
