"""What policies gain over the best baseline, from the figures of their runs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from specrouter.bench.replay import medians


def over_rounds(
    rounds: Sequence[Mapping[str, Mapping[str, Any]]], baselines: Collection[str]
) -> dict[str, Any]:
    """Of each policy the medians of its figures and of its ratios within a round; the ratio of
    violations is of sums over rounds, since a round may have none."""
    result = medians([with_ratios(one, baselines) for one in rounds])
    known = [name for name in rounds[0] if name in baselines]
    for name, row in result.items() if known else ():
        fewest = sum(min(one[other]["violations"] for other in known) for one in rounds)
        row["over"]["violations"] = _ratio(fewest, sum(one[name]["violations"] for one in rounds))
    return result


def with_ratios(
    rows: Mapping[str, Mapping[str, Any]], baselines: Collection[str]
) -> dict[str, dict[str, Any]]:
    """The figures of each policy in a round, with what it gains `over` that round's best baseline.

    violations: the fewest of a baseline over its own; None where it has none itself, or none was
    measured. goodput: its own over the highest of a baseline, which may be another one. ttft_p99:
    its own over target-only's. eaf_tpot: target-only's mean TPOT over its own (EAF: SpecRouter,
    section 6).
    """
    known = [row for name, row in rows.items() if name in baselines]
    fewest = min((row["violations"] for row in known), default=None)
    highest = max((row["goodput_tokens_per_s"] for row in known), default=None)
    alone = rows.get("target-only", {})
    first = alone.get("ttft_ms", {}).get("p99")
    return {
        name: {
            **row,
            "over": {
                "violations": _ratio(fewest, row["violations"]),
                "goodput": _ratio(row["goodput_tokens_per_s"], highest),
                "ttft_p99": _ratio(row["ttft_ms"]["p99"], first),
                "eaf_tpot": _ratio(alone.get("mean_tpot_ms"), row["mean_tpot_ms"]),
            },
        }
        for name, row in rows.items()
    }


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None
