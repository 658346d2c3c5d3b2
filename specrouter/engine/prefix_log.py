"""PrefixLog: how much of their prompts the last requests found in the prefix cache.

Contract: told by the engine's thread, read by any; keeps the last 256.
"""

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from specrouter.request.running import RunningRequest

_RECORDS = 256


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

    def to_json(self) -> dict[str, Any]:
        share = self.cached_tokens / self.prompt_tokens
        return asdict(self) | {"unix_s": round(self.unix_s, 3), "hit_rate": round(share, 4)}


class PrefixLog:
    def __init__(self) -> None:
        self._records: deque[PrefixRecord] = deque(maxlen=_RECORDS)

    @property
    def records(self) -> list[PrefixRecord]:
        """Oldest first."""
        return list(self._records)

    def note(self, request: RunningRequest) -> None:
        handle, prompt_tokens = request.handle, len(request.spec.token_ids)
        self._records.append(
            PrefixRecord(
                time.time(),
                handle.request_id,
                handle.log_extra["request_id"],
                prompt_tokens,
                min(request.cached_tokens, prompt_tokens),
            )
        )
