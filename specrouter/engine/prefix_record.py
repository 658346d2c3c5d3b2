"""How much of its prompt a request that has ended found in the prefix cache."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from specrouter.request.running import RunningRequest


@dataclass(frozen=True)
class PrefixRecord:
    """A request that has ended, and had tokens.

    Attributes:
        unix_s: when it was, in seconds since 1970.
        request: its number, as in the log; `request_id`: of its HTTP request.
        cached_tokens: of the prompt's, that were read before.
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
