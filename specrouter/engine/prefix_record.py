"""Records of how many prompt tokens ended requests found in the prefix cache."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from specrouter.request.running import RunningRequest


@dataclass(frozen=True)
class PrefixRecord:
    """A request that has ended, and produced tokens.

    Attributes:
        unix_s: time of its end, in seconds since 1970.
        request: its number, as in the log; `request_id`: that of its HTTP request.
        prompt_tokens: tokens of its prompt.
        cached_tokens: those of them that it did not have to read.
    """

    unix_s: float
    request: int
    request_id: str | None
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, request: RunningRequest) -> "PrefixRecord":
        handle, prompt_tokens = request.handle, len(request.spec.token_ids)
        cached = min(request.cached_tokens, prompt_tokens)
        http_id = handle.log_extra["request_id"]
        return cls(time.time(), handle.request_id, http_id, prompt_tokens, cached)

    def to_json(self) -> dict[str, Any]:
        share = self.cached_tokens / self.prompt_tokens
        return asdict(self) | {"unix_s": round(self.unix_s, 3), "hit_rate": round(share, 4)}
