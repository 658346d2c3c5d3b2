"""States of replicas, of which tests say what matters to them."""

from typing import Any

from specrouter.cluster.state import ReplicaState, ReplicaView


def state(running: int = 0, waiting: int = 0, **given: Any) -> ReplicaState:
    """10 ms a token, 1 ms more for each further request; 0.1 ms a prompt token."""
    usual = {
        "rows": 4,
        "kv_reserved_tokens": 0,
        "kv_capacity_tokens": 1000,
        "unread_tokens": 0,
        "tpot_ms": ((1, 10.0), (2, 11.0), (4, 13.0)),
        "prefill_ms": 0.1,
        "tightest_tpot_ms": None,
        "baseline_tpot_ms": 20.0,
        "max_request_tokens": 256,
        "retry_after_s": 0.0,
        "fingerprint": "fp_1",
    }
    return ReplicaState(running=running, waiting=waiting, **{**usual, **given})


def view(name: str, own: ReplicaState | None = None, **given: Any) -> ReplicaView:
    own = own or state()
    return ReplicaView(name=name, state=own, **{"reported": own, "age_s": 0.1, **given})
