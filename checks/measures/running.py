"""What is measured on a running service: how deep calls go, and how many functions one needs.

A router with two bundled models answers two requests through the HTTP application: one leaves the
chain to the scheduler, the other names it. Every call of a function of our packages is seen by
`sys.setprofile`; comprehensions and lambdas are not counted, nor are frames of other packages.
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from checks.measures.sources import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("tiny-1m", "tiny-3m")
PLACES = {
    "HTTP before", "queue", "decision", "processors", "attention", "handing over", "HTTP after",
}  # fmt: skip
PROMPT = "def fib(n):\n    "


@dataclass(frozen=True)
class Running:
    """Call stacks of our functions, outermost first, as `specrouter/router.py:ChainRouter.open`.

    Attributes:
        to_attention: the deepest from `Engine.step` to the attention plug-in, both counted.
        to_decision: the same, to what is called furthest below the planner's `plan`.
        way: distinct functions on the deepest stacks to seven places that a request comes by: HTTP
            before its first token, the queue, the decision, the processors, attention, the
            handing over of a token, and HTTP after it.
    """

    to_attention: Sequence[str]
    to_decision: Sequence[str]
    way: Sequence[str]


@dataclass
class _Recorder:
    """Sees calls while it is switched on, and keeps the deepest stack to each place."""

    is_on: bool = False
    deepest: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _names: dict[CodeType, str | None] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if not self.is_on or event != "call" or self._name(frame.f_code) is None:
            return
        stack = self._stack(frame)
        for place in self._places(stack):
            if len(stack) > len(self.deepest.get(place, ())):
                self.deepest[place] = stack

    def _places(self, stack: Sequence[str]) -> Iterator[str]:
        file, _, function = stack[-1].partition(":")
        if "attention" in file:
            yield "attention"
        elif file.startswith("processors/"):
            yield "processors"
        elif function.endswith((".deliver", ".hand_over")) and "engine.py" not in file:
            yield "handing over"
        elif file.endswith("admission_queue.py") and function.endswith(".push"):
            yield "queue"
        elif "/http/" in file:
            yield "HTTP after" if "handing over" in self.deepest else "HTTP before"
        if any("planner.py:Planner.plan" in name for name in stack):
            yield "decision"

    def _stack(self, frame: FrameType | None) -> tuple[str, ...]:
        found: list[str] = []
        while frame is not None:
            name = self._name(frame.f_code)
            if name is not None:
                found.append(name)
            frame = frame.f_back
        return tuple(reversed(found))

    def _name(self, code: CodeType) -> str | None:
        """None for what is not counted."""
        if code not in self._names:
            self._names[code] = _named(code)
        return self._names[code]


def _named(code: CodeType) -> str | None:
    path = Path(code.co_filename)
    if code.co_name.startswith("<") or not path.is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    return f"{relative}:{code.co_qualname}" if relative.parts[0] in PACKAGES else None


def _below_step(stack: Sequence[str]) -> Sequence[str]:
    steps = [number for number, name in enumerate(stack) if name.endswith("engine.py:Engine.step")]
    return stack[steps[0] :]


def measure() -> Running:
    recorder = _Recorder()
    with _seen_by(recorder), _router() as router:
        _ask(router)  # imports and caches of a first request are not of every request's way
        recorder.is_on = True
        _ask(router)
        _ask(router, {"chain": list(MODELS), "depth": 3, "width": 2})
        recorder.is_on = False
    deepest = recorder.deepest
    assert len(deepest) == len(PLACES), f"not found: {PLACES - set(deepest)}"
    way = sorted(set().union(*deepest.values()))
    return Running(_below_step(deepest["attention"]), _below_step(deepest["decision"]), way)


@contextmanager
def _seen_by(recorder: _Recorder) -> Iterator[None]:
    """Threads that begin within are seen; this one is not, until the request is sent."""
    threading.setprofile(recorder)
    try:
        yield
    finally:
        threading.setprofile(None)


@contextmanager
def _router() -> Iterator[Any]:
    from specrouter import ChainRouter

    models = [{"name": name, "source": f"bundled:{name}", "dtype": "float32"} for name in MODELS]
    settings = {
        "pool": {"target": MODELS[-1], "models": models},
        "engine": {"max_requests": 4, "max_model_len": 128},
    }
    with ChainRouter.from_config(settings) as router:
        yield router


def _ask(router: Any, speculation: Any = None) -> None:
    """One streamed completion, sent from a thread of its own so that the recorder sees it."""
    failures: list[BaseException] = []

    def send() -> None:
        try:
            asyncio.run(_complete(router, speculation))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


async def _complete(router: Any, speculation: Any) -> None:
    import httpx

    from specrouter.http.app import create_app

    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 48, "ignore_eos": True}
    body["temperature"] = 0
    if speculation is not None:
        body["speculation"] = speculation
    transport = httpx.ASGITransport(create_app(router))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post("/v1/completions", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n")
