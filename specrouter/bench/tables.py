"""The tables of the benchmarks, from their JSON documents."""

from collections.abc import Iterator, Mapping
from typing import Any

_CHAINS_HEAD = (
    f"{'':44}{'tokens/s':>9}{'req/s':>7}{'over off':>10}{'quartiles':>14}{'TPOT ms':>9}"
    f"{'accepted':>10}{'distinct':>10}{'control':>9}"
)
_LOAD_HEAD = (
    f"{'':16}{'attained':>9}{'violated':>9}{'goodput':>9}{'tokens/s':>9}{'req/s':>7}"
    f"{'TTFT ms p50/p95/p99':>21}{'TPOT ms p50/p95/p99':>21}{'e2e s p50/p95/p99':>21}"
    f"{'running':>9}{'accepted':>9}{'errors':>7}"
)


def chains_table(document: Mapping[str, Any]) -> str:
    """One block per batch size, then the ratios by category."""
    lines = [model_sizes(document["conditions"])]
    for batch, result in document["batches"].items():
        bases = [
            base for base in next(iter(result["contenders"].values()))["over"] if base != "off"
        ]
        head = _CHAINS_HEAD + "".join(f"{f'over {base}':>20}" for base in bases)
        lines += ["", f"batch {batch}", *result.get("notes", ()), head]
        lines += [_row(name, row, bases) for name, row in result["contenders"].items()]
        lines += _by_category(result["contenders"])
    return "\n".join(lines)


def model_sizes(conditions: Mapping[str, Any]) -> str:
    """`small 1.1M, big 201.9M int8 (inflated)`."""
    parts = []
    for name, model in conditions["models"].items():
        size = f" {model['parameters'] / 1e6:.1f}M" if model["parameters"] else ""
        weights = model.get("weights")
        kept = "" if weights in (None, "plain") else f" {weights}"
        parts.append(f"{name}{size}{kept}{' (inflated)' if model['is_inflated'] else ''}")
    return ", ".join(parts)


def _row(name: str, row: Mapping[str, Any], bases: list[str]) -> str:
    off, tpot = row["over"]["off"], row["tpot_ms"]
    quartiles = f"{off['low']:.2f}-{off['high']:.2f}"
    others = "".join(f"{row['over'][base]['median']:20.2f}" for base in bases)
    return (
        f"{name:44}{row['tokens_per_s']['median']:9.1f}{row['requests_per_s']['median']:7.2f}"
        f"{off['median']:10.2f}{quartiles:>14}{number(tpot and tpot['median']):>9}"
        f"{number(row['acceptance_length']):>10}{percent(row['distinct_4grams']):>10}"
        f"{percent(row.get('control_share')):>9}{others}"
    )


def _by_category(rows: Mapping[str, Any]) -> Iterator[str]:
    categories = next(iter(rows.values()))["over_by_category"]
    if len(categories) < 2:
        return
    names = "".join(f"{name:>14.13}" for name in categories)
    yield f"{'tokens/s, by category':44}" + names
    for name, row in rows.items():
        by = row["tokens_per_s_by_category"]
        yield f"{name:44}" + "".join(f"{by[one]['median']:14.1f}" for one in categories)
    yield f"{'over off, by category':44}" + names
    for name, row in rows.items():
        over = row["over_by_category"]
        yield f"{name:44}" + "".join(f"{over[one]['off']['median']:14.2f}" for one in categories)


def load_rows(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The figures of runs on the same requests, by name; with ratios, where they have any."""
    ratios = next(iter(rows.values())).get("over", {})
    yield _LOAD_HEAD + "".join(f"{f'{name} x':>13}" for name in ratios)
    for name, row in rows.items():
        over = "".join(f"{number(row['over'][one]):>13}" for one in ratios)
        yield (
            f"{name:16}{percent(row['attainment']):>9}{row['violations']:>9g}"
            f"{row['goodput_tokens_per_s']:9.1f}{row['tokens_per_s']:9.1f}"
            f"{row['requests_per_s']:7.2f}{_percentiles(row['ttft_ms']):>21}"
            f"{_percentiles(row['tpot_ms']):>21}{_seconds(row['e2e_ms']):>21}"
            f"{row['mean_running']:9.1f}{number(row['acceptance_length']):>9}{row['errors']:>7g}"
            f"{over}"
        )


def _percentiles(values: Mapping[str, float | None]) -> str:
    return "/".join("-" if value is None else f"{value:.0f}" for value in values.values())


def _seconds(values_ms: Mapping[str, float | None]) -> str:
    return "/".join("-" if ms is None else f"{ms / 1000:.1f}" for ms in values_ms.values())


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
