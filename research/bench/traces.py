"""Traces: when requests arrive, of which category and length, and how soon they want their tokens.

Contract: pure functions from arrivals to arrivals; times rise from 0. Two formats are read:
AdaServe's, with categories and objectives, and Azure's, whose category is in the file's name and
which then gets AdaServe's objective for it. `slo_ratio` is always times the baseline latency here.
Source: AdaServe, section 6.1; its artifact's traces; AzurePublicDataset, 2023.
"""

import csv
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from modelpool.errors import ConfigError


@dataclass(frozen=True)
class Arrival:
    """`slo_ratio`: objective of a token's time over the baseline latency; None: no objective."""

    at_s: float
    category: str
    input_tokens: int
    output_tokens: int
    slo_ratio: float | None = None


@dataclass(frozen=True)
class _Kind:
    share: float
    input_tokens: int
    published_slo: float


# Shares and objectives of AdaServe's section 6.1, as its traces write them; lengths are the medians
# of `adaserve_fig8_9_rps3.6_ol256`.
_KINDS: Mapping[str, _Kind] = {
    "coding": _Kind(0.6, 118, 1.2),
    "chat": _Kind(0.2, 15, -50.0),
    "summarization": _Kind(0.2, 706, -150.0),
}
_OUTPUT_TOKENS = 256
_AZURE_CATEGORIES = {"code": "coding", "conv": "chat"}  # by what the file's name ends in
_ADASERVE_COLUMNS = ("emission_time_ms", "category", "input_tokens", "output_tokens", "slo_ratio")
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_Row = Mapping[str, str]


def read_trace(path: Path, baseline_ms: float) -> list[Arrival]:
    """All arrivals of a file, by time.

    Args:
        baseline_ms: of the trace's authors; makes ratios of objectives that are milliseconds.

    Raises:
        ConfigError: names `--trace` and the line.
    """
    header, rows = _rows(path)
    parse = _format(path, header, baseline_ms)
    arrivals = [_parsed(path, number, row, parse) for number, row in enumerate(rows, 2)]
    if not arrivals:
        raise ConfigError("--trace", f"{path} holds no requests")
    return _from_zero(sorted(arrivals, key=lambda arrival: arrival.at_s))


def poisson(rate_per_s: float, count: int, baseline_ms: float, seed: int) -> list[Arrival]:
    """Arrivals with exponential gaps, of AdaServe's mix; input lengths vary by half."""
    draw = random.Random(f"poisson {seed}")
    names, shares = list(_KINDS), [kind.share for kind in _KINDS.values()]
    at_s, arrivals = 0.0, []
    for _ in range(count):
        name = draw.choices(names, shares)[0]
        tokens = round(_KINDS[name].input_tokens * draw.uniform(0.5, 1.5))
        arrivals.append(
            Arrival(at_s, name, tokens, _OUTPUT_TOKENS, _standard_ratio(name, baseline_ms))
        )
        at_s += draw.expovariate(rate_per_s)
    return arrivals


def excerpt(arrivals: Sequence[Arrival], skip: int, count: int) -> list[Arrival]:
    """`count` of them after the first `skip`. Raises `ConfigError` where there are fewer."""
    if skip + count > len(arrivals):
        reason = f"the trace has {len(arrivals)} requests, and {skip} are left out"
        raise ConfigError("--requests", f"{count} are asked for, but {reason}")
    return _from_zero(arrivals[skip : skip + count])


def stretched(arrivals: Sequence[Arrival], scale: float) -> list[Arrival]:
    """With `scale` times the gaps: 2 halves the rate."""
    return [replace(arrival, at_s=arrival.at_s * scale) for arrival in arrivals]


def resized(
    arrivals: Sequence[Arrival], length_scale: float, output_tokens: int | None, limit: int
) -> list[Arrival]:
    """Lengths times `length_scale`, at least 1 each; outputs of `output_tokens` where given.

    Args:
        limit: tokens of a request, prompt and output. A prompt that is too long is cut, and an
            output before it where it takes more than half.
    """

    def one(arrival: Arrival) -> Arrival:
        made = output_tokens or min(_scaled(arrival.output_tokens, length_scale), limit // 2)
        read = min(_scaled(arrival.input_tokens, length_scale), limit - made)
        return replace(arrival, input_tokens=read, output_tokens=made)

    return [one(arrival) for arrival in arrivals]


def urgent_category(arrivals: Sequence[Arrival]) -> str | None:
    """The category with the tightest objective; None where nothing has one."""
    found = [(a.slo_ratio, a.category) for a in arrivals if a.slo_ratio is not None]
    return min(found)[1] if found else None


def with_urgent_share(arrivals: Sequence[Arrival], share: float, seed: int) -> list[Arrival]:
    """The same times, with as many requests of the tightest category as make up `share`.

    No more of them change than must; those that do become copies of others of the trace, so each
    category keeps its lengths, and the others their proportions.

    Raises:
        ConfigError: the trace has no other category, or none with an objective.
    """
    urgent = urgent_category(arrivals)
    groups: dict[bool, list[int]] = {True: [], False: []}
    for index, arrival in enumerate(arrivals):
        groups[arrival.category == urgent].append(index)
    excess = len(groups[True]) - round(share * len(arrivals))
    changed, donors = groups[excess > 0], groups[excess <= 0]
    if excess and (urgent is None or not donors):
        reason = "needs a category with objectives, and another one, in the trace"
        raise ConfigError("--urgent-share", reason)
    draw = random.Random(f"urgent {seed}")
    result = list(arrivals)
    for index in draw.sample(changed, abs(excess)):
        result[index] = replace(arrivals[draw.choice(donors)], at_s=arrivals[index].at_s)
    return result


def rate_per_s(arrivals: Sequence[Arrival]) -> float:
    """Gaps over the time that they take; infinite where all arrive at once."""
    span_s = arrivals[-1].at_s - arrivals[0].at_s
    return (len(arrivals) - 1) / span_s if span_s else math.inf


def _from_zero(arrivals: Sequence[Arrival]) -> list[Arrival]:
    start_s = arrivals[0].at_s
    return [replace(arrival, at_s=arrival.at_s - start_s) for arrival in arrivals]


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))


def _standard_ratio(category: str, baseline_ms: float) -> float | None:
    kind = _KINDS.get(category)
    return None if kind is None else _ratio(kind.published_slo, baseline_ms)


def _ratio(published: float, baseline_ms: float) -> float:
    """AdaServe's traces have ratios as positive numbers, and milliseconds as negative ones."""
    if not math.isfinite(published) or published == 0:
        raise ValueError("slo_ratio must be a number other than 0")
    return published if published > 0 else -published / baseline_ms


def _rows(path: Path) -> tuple[Sequence[str], list[dict[str, str]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            return reader.fieldnames or (), list(reader)
    except OSError as error:
        raise ConfigError("--trace", f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("--trace", f"{path} is not a text of comma-separated values") from error


def _format(path: Path, header: Sequence[str], baseline_ms: float) -> Callable[[_Row], Arrival]:
    if set(_ADASERVE_COLUMNS) <= set(header):
        return partial(_adaserve, baseline_ms=baseline_ms)
    if set(_AZURE_COLUMNS) <= set(header):
        category = _AZURE_CATEGORIES.get(path.stem.rpartition("_")[2], "other")
        return partial(_azure, category=category, baseline_ms=baseline_ms)
    wanted = " nor ".join(map(",".join, (_ADASERVE_COLUMNS, _AZURE_COLUMNS)))
    raise ConfigError("--trace", f"{path} begins with neither {wanted}")


def _parsed(path: Path, number: int, row: _Row, parse: Callable[[_Row], Arrival]) -> Arrival:
    try:
        arrival = parse(row)
        if not math.isfinite(arrival.at_s):
            raise ValueError("its time must be finite")
        if arrival.input_tokens < 1 or arrival.output_tokens < 1:
            raise ValueError("its lengths must be at least 1")
    except (ValueError, TypeError) as error:  # TypeError: a cell is missing
        raise ConfigError("--trace", f"line {number} of {path}: {error}") from error
    return arrival


def _adaserve(row: _Row, baseline_ms: float) -> Arrival:
    return Arrival(
        float(row["emission_time_ms"]) / 1000,
        row["category"],
        int(row["input_tokens"]),
        int(row["output_tokens"]),
        _ratio(float(row["slo_ratio"]), baseline_ms),
    )


def _azure(row: _Row, category: str, baseline_ms: float) -> Arrival:
    return Arrival(
        datetime.fromisoformat(row["TIMESTAMP"]).timestamp(),
        category,
        int(row["ContextTokens"]),
        int(row["GeneratedTokens"]),
        _standard_ratio(category, baseline_ms),
    )
