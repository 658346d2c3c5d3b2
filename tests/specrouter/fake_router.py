"""A router without models: every request gets the same runs of tokens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from specrouter import Delta, RequestError, RequestMetrics, RequestOutput

RUNS = ((" a", [5]), ("b\nc", [6, 7]), (" é", [8]))
METRICS = RequestMetrics(
    ttft_ms=20.0,
    tpot_ms=10.0,
    acceptance_length=1.5,
    cycles=4,
    chains={("small", "big"): 3, ("big",): 1},
    prompt_tokens=2,
    output_tokens=4,
)


class FakeRouter:
    """Records what it is asked.

    `hold_after`: waits forever after that many runs, as a slow request does. `error`: ends the
    request with that failure. `crash`: raises in mid-stream, as no router should.
    """

    def __init__(
        self, *, hold_after: int | None = None, error: str | None = None, crash: bool = False
    ) -> None:
        self.pool = SimpleNamespace(target="big", names=("small", "big"))
        self.is_healthy = True
        self.calls: list[tuple[Any, Any, Any]] = []
        self.open_requests = 0
        self.is_closed = False
        self._hold_after, self._error, self._crash = hold_after, error, crash

    def __enter__(self) -> FakeRouter:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    async def astream(
        self, prompt: str | Sequence[int], params: Any, speculation: Any = None
    ) -> AsyncGenerator[Delta]:
        self._accept(prompt, params, speculation)
        self.open_requests += 1
        try:
            for position, delta in enumerate(self._deltas()):
                if position == self._hold_after:
                    await asyncio.Event().wait()
                if self._crash and position == 1:
                    raise RuntimeError("the engine broke")
                yield delta
        finally:
            self.open_requests -= 1

    def stream(
        self, prompt: str | Sequence[int], params: Any, speculation: Any = None
    ) -> Iterator[Delta]:
        self._accept(prompt, params, speculation)
        return iter(self._deltas())

    def _accept(self, prompt: str | Sequence[int], params: Any, speculation: Any) -> None:
        for name in getattr(speculation, "chain", None) or ():
            if name not in self.pool.names:
                raise RequestError("speculation.chain", f"{name!r} is not in the pool")
        self.calls.append((prompt, params, speculation))

    def _deltas(self) -> list[Delta]:
        *earlier, last = [Delta(text=text, token_ids=ids) for text, ids in RUNS]
        output = RequestOutput(
            text="".join(text for text, _ in RUNS),
            token_ids=list(itertools.chain.from_iterable(ids for _, ids in RUNS)),
            finish_reason="error" if self._error else "length",
            error=self._error,
            metrics=METRICS,
            seed=7,
        )
        ending = Delta(last.text, last.token_ids, output.finish_reason, output)
        return [*earlier, ending]
