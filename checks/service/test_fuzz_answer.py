"""What counts as a failure of the service, and how a request is shown."""

import httpx
import pytest

from checks.service.fuzz_answer import complaint

ERROR = {"error": {"message": "no", "type": "server_error", "param": None, "code": None}}
STREAM = {"content-type": "text/event-stream"}
OTHER_SHAPES: tuple[object, ...] = ({"detail": "no"}, [], {"error": "no"})
DONE = "data: [DONE]\n\n"
FAILED = f'data: {{"error": {{"type": "server_error"}}}}\n\n{DONE}'


def answer(status: int, method: str = "POST", **content: object) -> httpx.Response:
    request = httpx.Request(method, "http://test/v1/completions")
    return httpx.Response(status, request=request, **content)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "passes",
    [
        *(answer(status, json=ERROR) for status in (400, 404, 405, 413, 503)),
        answer(405, "HEAD", headers={"content-type": "application/json"}),  # it has no body
        answer(200, text=DONE, headers=STREAM),
    ],
)
def test_a_refusal_in_the_error_shape_and_a_stream_with_its_end_are_no_failures(
    passes: httpx.Response,
) -> None:
    assert complaint(passes) is None


@pytest.mark.parametrize(
    "fails",
    [
        *(answer(status, json=ERROR) for status in (500, 501, 502)),
        *(answer(422, json=content) for content in OTHER_SHAPES),
        *(answer(200, text=text, headers=STREAM) for text in ("data: {}\n\n", DONE * 2, FAILED)),
    ],
)
def test_other_5xx_other_shapes_and_broken_streams_are_failures(fails: httpx.Response) -> None:
    assert complaint(fails) is not None
