"""Points of a sweep: the requests that all policies get, at each rate, mix and scale of objectives.

Contract: pure but for the trace, which is read from a file. Raises `ConfigError` for what does not
fit the trace or the models.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modelpool.errors import ConfigError
from specrouter.bench import traces
from specrouter.bench.dataset_lengths import poisson_of_datasets
from specrouter.bench.load_options import LoadOptions
from specrouter.bench.traces import Arrival


@dataclass(frozen=True)
class Point:
    """One of the sweep. `arrivals` are the requests that all its policies get."""

    scale: float
    urgent_share: float
    slo_scale: float
    arrivals: tuple[Arrival, ...]

    def to_json(self) -> dict[str, Any]:
        rate = traces.rate_per_s(self.arrivals)
        return {
            "scale": self.scale,
            "requests_per_s": rate if rate < float("inf") else None,
            "urgent_share": self.urgent_share,
            "slo_scale": self.slo_scale,
        }


def read_arrivals(options: LoadOptions) -> list[Arrival]:
    """The requests that are asked for, before any rescaling."""
    if options.poisson is not None and options.lengths == "specrouter":
        return poisson_of_datasets(options.poisson, options.requests, options.seed)
    if options.poisson is not None:
        return traces.poisson(
            options.poisson, options.requests, options.trace_baseline_ms, options.seed
        )
    assert options.trace is not None, "the options have one of both"
    found = traces.read_trace(options.trace, options.trace_baseline_ms)
    return traces.excerpt(found, options.skip, options.requests)


def sweep(trace: Sequence[Arrival], options: LoadOptions, limit: int) -> list[Point]:
    """A point for each combination of what has several values.

    Args:
        limit: tokens of a request.
    """
    if options.output_tokens is not None and options.output_tokens >= limit:
        raise ConfigError("--output-tokens", f"must be below the model's length of {limit}")
    resized = traces.resized(trace, options.length_scale, options.output_tokens, limit)
    shares: tuple[float | None, ...] = options.urgent_share or (None,)
    points = []
    for share, slo_scale, scale in itertools.product(shares, options.slo_scale, options.scale):
        mixed = resized
        if share is not None:
            mixed = traces.with_urgent_share(resized, share, options.seed)
        shown = traces.urgent_share(resized) if share is None else share
        arrivals = traces.with_slo_scale(traces.stretched(mixed, scale), slo_scale)
        points.append(Point(scale, shown, slo_scale, tuple(arrivals)))
    return points
