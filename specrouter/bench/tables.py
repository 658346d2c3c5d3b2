"""The tables of the benchmarks, from their JSON documents."""

from collections.abc import Iterator, Mapping
from typing import Any

_CHAINS_HEAD = (
    f"{'':44}{'tokens/s':>9}{'req/s':>7}{'over off':>10}{'quartiles':>14}{'EAF':>6}"
    f"{'over transformers':>19}"
    f"{'accepted':>10}{'distinct':>10}{'control':>9}"
)
_LOAD_HEAD = (
    f"{'':16}{'attained':>9}{'violated':>9}{'goodput':>9}{'tokens/s':>9}{'req/s':>7}"
    f"{'TTFT ms p50/p95/p99':>21}{'TPOT ms p50/p95/p99':>21}{'e2e s p50/p95/p99':>21}"
    f"{'running':>9}{'accepted':>9}{'viol. x':>9}{'goodput x':>10}{'TTFT x':>8}{'EAF':>6}"
    f"{'errors':>7}"
)


def chains_table(document: Mapping[str, Any]) -> str:
    """One block per batch size, then the ratios by category and those of repetitive texts.

    EAF: the target's own mean TPOT over the contender's.
    """
    lines = [model_sizes(document["conditions"])]
    if document["conditions"].get("recorded"):
        lines.append("recorded outputs, replayed: the text is given, and is not the target's own")
    for batch, result in document["batches"].items():
        lines += ["", f"batch {batch}", *_shapes(result), _CHAINS_HEAD]
        lines += [_row(label(name, result), row) for name, row in result["contenders"].items()]
        lines += _by_category(result)
    return "\n".join(lines)


def label(name: str, result: Mapping[str, Any]) -> str:
    """A contender's name, with the other ones that it goes by."""
    others = [alias for alias, chain in result["aliases"].items() if chain == name]
    return f"{name} ({', '.join(others)})" if others else name


def model_sizes(conditions: Mapping[str, Any]) -> str:
    """`small 1.1M, big 201.9M int8 (inflated)`."""
    parts = []
    for name, model in conditions["models"].items():
        size = f" {model['parameters'] / 1e6:.1f}M" if model["parameters"] else ""
        weights = model.get("weights")
        kept = "" if weights in (None, "plain") else f" {weights}"
        parts.append(f"{name}{size}{kept}{' (inflated)' if model['is_inflated'] else ''}")
    return ", ".join(parts)


def _row(name: str, row: Mapping[str, Any]) -> str:
    off, reference = row["over"].get("off"), row["over"].get("transformers")
    gain = row["eaf_tpot"]
    quartiles = f"{off['low']:.2f}-{off['high']:.2f}" if off else "-"
    return (
        f"{name:44}{row['tokens_per_s']['median']:9.1f}{row['requests_per_s']['median']:7.2f}"
        f"{_number(off and off['median']):>10}{quartiles:>14}{_number(gain and gain['median']):>6}"
        f"{_number(reference and reference['median']):>19}"
        f"{_number(row['acceptance_length']):>10}{_percent(row['distinct_4grams']):>10}"
        f"{_percent(row.get('control_share')):>9}"
    )


def _shapes(result: Mapping[str, Any]) -> Iterator[str]:
    for chain, shape in result["shapes"].items():
        yield f"  {label(chain, result)}: depth {shape['depth']}, width {shape['width']}"
    for name, reason in result["left_out"].items():
        yield f"  left out: {name}: {reason}"


def _by_category(result: Mapping[str, Any]) -> Iterator[str]:
    rows = result["contenders"]
    categories = next(iter(rows.values()))["over_by_category"]
    if len(categories) < 2:
        return
    names = "".join(f"{name:>14.13}" for name in categories)
    yield f"{'tokens/s, by category':44}" + names
    for name, row in rows.items():
        by = row["tokens_per_s_by_category"]
        found = [by[category]["median"] for category in categories]
        yield f"{label(name, result):44}" + "".join(f"{speed:14.1f}" for speed in found)
    yield f"{'over off, by category':44}" + names
    for name, row in rows.items():
        found = [row["over_by_category"][category]["off"]["median"] for category in categories]
        yield f"{label(name, result):44}" + "".join(f"{ratio:14.2f}" for ratio in found)


def load_table(document: Mapping[str, Any]) -> str:
    """Ratios are over the best baseline; that of TTFT (p99) over target-only. EAF: target-only's
    mean TPOT over the policy's."""
    lines = [_load_title(document["conditions"])]
    for point in document["points"]:
        lines += ["", describe(point), _LOAD_HEAD]
        lines += [_load_row(name, row) for name, row in point["policies"].items()]
        lines += _attained_by_category(point["policies"])
    return "\n".join(lines)


def describe(point: Mapping[str, Any]) -> str:
    """`scale 2: 1.80 requests/s, 60% urgent, objectives x 1`."""
    return (
        f"scale {point['scale']:g}: {_number(point['requests_per_s'])} requests/s, "
        f"{point['urgent_share']:.0%} urgent, objectives x {point['slo_scale']:g}"
    )


def _load_title(conditions: Mapping[str, Any]) -> str:
    models = model_sizes(conditions) if "models" in conditions else _elsewhere(conditions)
    acceptance = conditions.get("simulated_acceptance")
    if acceptance is not None:
        models += f"\nSIMULATED, a best token accepted in {acceptance:.2f} of cases"
    return f"{models}\nbaseline latency {conditions['baseline_ms']:.2f} ms"


def _elsewhere(conditions: Mapping[str, Any]) -> str:
    return str(conditions.get("server") or conditions["machine"])


def _load_row(name: str, row: Mapping[str, Any]) -> str:
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
    return f"{_percent(one['attainment'])} at {_number(one['tpot_ms']['p50'])}{wanted} ms"


def _percentiles(values: Mapping[str, float | None]) -> str:
    return "/".join("-" if value is None else f"{value:.0f}" for value in values.values())


def _seconds(values_ms: Mapping[str, float | None]) -> str:
    return "/".join("-" if ms is None else f"{ms / 1000:.1f}" for ms in values_ms.values())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
