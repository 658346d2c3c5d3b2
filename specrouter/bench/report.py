"""The table of a benchmark, from its JSON document."""

from collections.abc import Iterator, Mapping
from typing import Any

_HEAD = (
    f"{'':44}{'tokens/s':>9}{'req/s':>7}{'over off':>10}{'quartiles':>14}{'EAF':>6}"
    f"{'over transformers':>19}"
    f"{'accepted':>10}{'distinct':>10}{'control':>9}{'efficiency':>12}"
)


def table(document: Mapping[str, Any]) -> str:
    """One block per batch size, then the ratios by category and those of repetitive texts.

    EAF: the target's own mean TPOT over the contender's.
    """
    lines = [model_sizes(document["conditions"])]
    if document["conditions"].get("recorded"):
        lines.append("recorded outputs, replayed: the text is given, and is not the target's own")
    for batch, result in document["batches"].items():
        lines += ["", f"batch {batch}", *_shapes(result), _HEAD]
        lines += [_row(label(name, result), row) for name, row in result["contenders"].items()]
        lines += _by_category(result)
        lines += _distinct(result)
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
        kept = " int8" if model.get("weights") == "int8" else ""
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
        f"{_percent(row.get('control_share')):>9}{_percent(row.get('efficiency')):>12}"
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


def _distinct(result: Mapping[str, Any]) -> Iterator[str]:
    for name, row in result["contenders"].items():
        if "distinct_enough_share" in row:
            off = row.get("over_distinct", {}).get("off")
            ratio = f", over off in those {off['median']:.2f}" if off else ""
            yield f"{label(name, result):44}{row['distinct_enough_share']:6.0%} varied texts{ratio}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
