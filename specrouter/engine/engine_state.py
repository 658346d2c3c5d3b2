"""The state of an engine that is shown to operators."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from specrouter.profile.speedup import Speedup
from statemgr import CacheCounts


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """The engine's state now; its values may come from different cycles.

    Attributes:
        rows: the most requests that run at once.
        kv_reserved_tokens: KV slots held by running requests, out of `kv_capacity_tokens`.
        kv_bytes: size of each loaded model's KV store.
        quarantines: how often each model was put in quarantine; `quarantined`: the models in it.
        weight_bytes: size of each loaded model's weights; 0 for drafters without weights.
        unread_tokens: an upper bound of the prompt tokens left to read before first tokens.
        tightest_tpot_ms: lowest TPOT objective of running requests; None if there is none.
        control_faults: failures by part of the control plane, see `FaultGuard`.
        kv_cached_tokens: slots of cached prefixes, which use memory that no request holds.
        cache: counts of the prefix cache.
        speedups: measured speedup by drafts, by load; see `SpeedupMeter`.
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
    speedups: Mapping[int, Speedup] = field(default_factory=dict)
