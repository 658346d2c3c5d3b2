"""Outputs of requests as a router would give them."""

from collections.abc import Mapping
from typing import Any

from specrouter import RequestMetrics, RequestOutput


def request_output(
    token_ids: list[int], metrics: Mapping[str, Any], error: str | None = None
) -> RequestOutput:
    """As long as was asked, with these among its `metrics`, or failed with that `error`."""
    usual = {"ttft_ms": 1.0, "tpot_ms": 1.0, "cycles": 3, "chains": {}, "prompt_tokens": 1}
    told = RequestMetrics(**{**usual, "output_tokens": len(token_ids), **metrics})
    return RequestOutput(
        text="",
        token_ids=token_ids,
        finish_reason="error" if error else "length",
        metrics=told,
        seed=0,
        error=error,
    )
