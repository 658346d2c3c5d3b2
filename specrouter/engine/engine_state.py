"""EngineState: what may be shown of the engine at any time."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineState:
    """How the engine stands now, of which not all need be of the same cycle.

    Attributes:
        rows: that requests may have.
        kv_reserved_tokens: of the running requests, out of `kv_capacity_tokens`.
        kv_bytes: of the stores of models in memory.
        quarantines: how often each model was put to rest; `quarantined` rest now.
        control_faults: failures by part of the control plane, see `FaultGuard`.
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
