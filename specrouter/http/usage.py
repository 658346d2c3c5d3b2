"""Usage: the tokens of a request, as OpenAI counts them."""

from __future__ import annotations

from typing import Any

from specrouter.request.output import RequestMetrics


class Usage:
    """Grows while a request runs. Each prompt counts once, whatever its samples."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._drafted = self._accepted = self._cached = 0

    def add(self, tokens: int, metrics: RequestMetrics | None, sample: int = 0) -> None:
        """`tokens` that came; the `metrics` of one that has ended, of that sample."""
        self._completion_tokens += tokens
        if metrics is not None:
            self._drafted += metrics.drafted_tokens
            self._accepted += metrics.accepted_tokens
            self._cached += 0 if sample else metrics.cached_tokens

    def to_json(self) -> dict[str, Any]:
        """Predictions are what drafters drafted and the target verified; those of a text count
        once it has ended. So do cached tokens of the prompts, by each one's first sample."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self._accepted,
                "rejected_prediction_tokens": max(0, self._drafted - self._accepted),
            },
        }
