"""Times of the parts of a cycle: passes of a model, and the engine's other work.

Pure functions of a snapshot: no clock, no tensors. Not here: the tokens that a chain brings for
that time (`prediction`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from modelpool.attention.backend import READING_QUERIES
from specrouter.profile.snapshot import Mode, PerformanceSnapshot
from specrouter.profile.time_curve import TimeCurve
from specrouter.request.params import MAX_TREE_TOKENS, Chain

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_STEADY_LAG = 2  # tokens that a drafter's first step reads: the last two are unread
_UNTRIED_SPEED = 0.02  # least share of the target's time that an untried model is assumed to take


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """The requests that decode together.

    Attributes:
        slots: KV slots that attention reads for each of them.
        remaining: mean tokens that each may still generate.
        lags: unread tokens of a model, over all requests; the last two of each not counted.
        others: further requests that decode in the same pass of the target on another route.
    """

    requests: int
    slots: int = 128
    remaining: float = 64.0
    lags: Mapping[str, float] = field(default_factory=dict)
    sampled: Mode = True
    others: int = 0

    @property
    def batch(self) -> int:
        """The number of requests in the target's pass."""
        return self.requests + self.others


def verification_ms(
    snapshot: PerformanceSnapshot,
    workload: Workload,
    target: str,
    places: Ints,
    prompt_tokens: int = 0,
    requests: Ints | None = None,
) -> Floats:
    """Return the time of the target's pass, and of the work around it.

    It reads `places` tokens that are verified, and `prompt_tokens`. `requests` replaces the
    workload's number of requests in the pass, in a shape that broadcasts.
    """
    batch = np.full(1, workload.batch) if requests is None else requests
    packed = (places + prompt_tokens).astype(np.float64)
    attended = (packed + READING_QUERIES * batch) * workload.slots
    return np.asarray(
        curve_of(snapshot, target, target).many(packed, attended)
        + stage_ms(snapshot, "verify", places)
        + stage_ms(snapshot, "cycle", batch)
    )


def forward_ms(
    snapshot: PerformanceSnapshot, name: str, target: str, workload: Workload, tokens: float
) -> float:
    """Return the current time of a model's pass over so many tokens of one request.

    0 for a text drafter, which keeps no state.
    """
    if not snapshot.parameters.get(name, 1):
        return 0.0
    one = Workload(requests=1, slots=workload.slots)
    return snapshot.machine * float(model_ms(snapshot, name, target, one, np.array([tokens]))[0])


def model_ms(
    snapshot: PerformanceSnapshot,
    name: str,
    target: str,
    workload: Workload,
    tokens: NDArray[np.generic],
) -> Floats:
    curve = curve_of(snapshot, name, target)
    packed = tokens.astype(np.float64)
    return curve.many(packed, (packed + READING_QUERIES * workload.requests) * workload.slots)


def stage_ms(snapshot: PerformanceSnapshot, stage: str, places: NDArray[np.generic]) -> Floats:
    curve = snapshot.stages.get(stage)
    if curve is None:
        return np.zeros(places.shape)
    return curve.many(places.astype(np.float64), np.zeros(places.shape))


def drafter_ms(
    snapshot: PerformanceSnapshot,
    workload: Workload,
    chain: Chain,
    depths: Ints,
    widths: Ints,
) -> Floats:
    """Return the time of the first model's steps for trees of these depths and widths, [O] each."""
    name, target, wide = chain[0], chain[-1], workload.requests * widths
    step = model_ms(snapshot, name, target, workload, wide)
    if not snapshot.parameters.get(name, 1):  # a text drafter's steps are alike, and rank no logits
        return np.asarray(depths * step)
    first = np.full(1, workload.requests * _STEADY_LAG)
    return np.asarray(
        model_ms(snapshot, name, target, workload, first)
        + (depths - 1) * step
        + depths * stage_ms(snapshot, "draft", wide)
    )


def drafting_ms(snapshot: PerformanceSnapshot, requests: int) -> float:
    """Return the additional time of the engine's own work in a cycle with drafts."""
    batch = np.array([requests])
    more = stage_ms(snapshot, "drafting", batch) - stage_ms(snapshot, "cycle", batch)
    return max(0.0, float(more[0]))


def quoted_ms(snapshot: PerformanceSnapshot, workload: Workload, target: str) -> Floats:
    """Return the time [K + 1] of a cycle in which only text drafters draft, by its verified nodes.

    It is without prompts, on a machine of normal speed. The engine's own work takes longer with
    nodes.
    """
    key = ("quoted", workload.batch, workload.slots)
    if key not in snapshot.target_ms:
        nodes, batch = np.arange(MAX_TREE_TOKENS + 1), np.array([workload.batch])
        more = stage_ms(snapshot, "quoting", batch) - stage_ms(snapshot, "cycle", batch)
        ms = verification_ms(snapshot, workload, target, workload.batch + nodes)
        around = np.where(nodes > 0, np.maximum(more, 0.0), 0.0)
        snapshot.target_ms[key] = np.maximum.accumulate(ms + around)
    return snapshot.target_ms[key]


def curve_of(snapshot: PerformanceSnapshot, name: str, target: str) -> TimeCurve:
    """Return a model's curve; for an untried one the target's, scaled by the parameters."""
    known = snapshot.times.get(name)
    if known is not None:
        return known
    reference = snapshot.times.get(target, TimeCurve(((1, 1.0),)))
    if name == target:
        return reference
    share = snapshot.parameters[name] / max(1, snapshot.parameters[target])
    return reference.scaled(max(share, _UNTRIED_SPEED))
