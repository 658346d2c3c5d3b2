"""What a client of the soak takes for a whole answer, and what not."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from checks.service.load import Asked, Outcome, ask

END = {"index": 0, "text": "b", "finish_reason": "length"}
MORE = {"index": 0, "text": "a", "finish_reason": None}
DONE = "data: [DONE]\n\n"


def chunk(*choices: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': choices})}\n\n"


def served(service: Any, stream: bool, leaves_after: float | None = None) -> Outcome:
    """Of one request to a service: a handler of `httpx.MockTransport`."""

    async def send() -> Outcome:
        transport = httpx.MockTransport(service)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await ask(client, Asked({"prompt": "x", "stream": stream}, leaves_after))

    return asyncio.run(send())


def outcome(status: int = 200, stream: bool = True, **content: Any) -> Outcome:
    return served(lambda _: httpx.Response(status, **content), stream)


def test_a_stream_with_one_end_and_done_is_complete() -> None:
    got = outcome(text=chunk(MORE) + chunk(END) + chunk() + DONE)
    assert (got.kind, got.texts) == ("complete", ("ab",))


@pytest.mark.parametrize(
    "text",
    [
        chunk(MORE) + DONE,
        chunk(END),
        chunk(END) + chunk(END) + DONE,
        chunk(END) + chunk(MORE) + DONE,
        chunk(END) + DONE + DONE,
        chunk(END) + DONE + chunk(),
        chunk(END) + chunk({**END, "index": 1}) + DONE,
        'data: {"error": {"message": "no"}}\n\n' + DONE,
        "event: x\n\n" + chunk(END) + DONE,
    ],
)
def test_any_other_stream_is_broken(text: str) -> None:
    assert outcome(text=text).kind == "broken"


def test_a_body_needs_a_finish_reason_of_a_text_that_ended() -> None:
    usage = {"completion_tokens": 1}
    assert outcome(stream=False, json={"choices": [END], "usage": usage}).kind == "complete"
    assert outcome(stream=False, json={"choices": [MORE], "usage": usage}).kind == "broken"


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_says_when_to_come_again(stream: bool) -> None:
    body = {"error": {"code": "overloaded"}}
    refused = outcome(503, stream, json=body, headers={"Retry-After": "2"})
    assert (refused.kind, refused.reason) == ("refused", "overloaded")
    assert outcome(503, stream, json=body).kind == "broken"
    assert outcome(500, stream, json=body, headers={"Retry-After": "2"}).kind == "broken"


@pytest.mark.parametrize("stream", [True, False])
def test_a_connection_that_breaks_before_an_answer_is_no_half_answer(stream: bool) -> None:
    def breaks(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset", request=request)

    assert served(breaks, stream).kind == "gone"


def test_a_client_leaves_after_so_many_chunks_or_seconds() -> None:
    endless = httpx.Response(200, text=chunk(MORE) * 9)
    assert served(lambda _: endless, True, leaves_after=3).kind == "left"

    async def slow(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(5)
        return endless

    assert served(slow, False, leaves_after=0.01).kind == "left"
