"""Requests for simulations and load benchmarks."""

from typing import Any

from specrouter.bench.replay import LoadRequest


def load_request(**given: Any) -> LoadRequest:
    """A chat that is sent at once and sampled, unless something else is `given`."""
    usual = {"at_s": 0.0, "category": "chat", "temperature": 1.0, "seed": 0}
    return LoadRequest(**{**usual, **given})
