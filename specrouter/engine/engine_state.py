"""EngineState: what may be shown of the engine at any time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from specrouter.profile.speedup import Speedup
from specrouter.view import LEAST_PACE_MARGIN
from statemgr import CacheCounts


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """How the engine stands now, of which not all need be of the same cycle.

    Attributes:
        rows: that requests may have.
        kv_reserved_tokens: held by the running requests, out of `kv_capacity_tokens`.
        kv_bytes: of the stores of models in memory.
        quarantines: how often each model was put to rest; `quarantined` rest now.
        weight_bytes: of models in memory, 0 of those without weights.
        unread_tokens: of prompts whose first token has not come, at most.
        tightest_tpot_ms: of the objectives of running requests; None where there is none.
        control_faults: failures by part of the control plane, see `FaultGuard`.
        kv_cached_tokens: of cached prefixes; they have what is not held.
        cache: what the prefix cache was good for.
        pace_margin: share of every TPOT objective that admission keeps back now.
        speedups: what drafts were measured to bring, by load; see `SpeedupMeter`.
    """

    running: int
    waiting: int
    rows: int
    kv_reserved_tokens: int
    kv_capacity_tokens: int
    kv_bytes: Mapping[str, int]
    quarantines: Mapping[str, int]
    quarantined: frozenset[str]
    control_faults: Mapping[str, int] = field(default_factory=dict)
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    unread_tokens: int = 0
    tightest_tpot_ms: float | None = None
    kv_cached_tokens: int = 0
    cache: CacheCounts = field(default_factory=CacheCounts)
    pace_margin: float = LEAST_PACE_MARGIN
    speedups: Mapping[int, Speedup] = field(default_factory=dict)
