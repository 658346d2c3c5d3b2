"""What counts as a failure of the service, and how a request is shown."""

import subprocess

import httpx
import pytest

from checks.service.fuzz_answer import Sent, complaint, curl

ERROR = {"error": {"message": "no", "type": "server_error", "param": None, "code": None}}
STREAM = {"content-type": "text/event-stream"}


def answer(status: int, method: str = "POST", **content: object) -> httpx.Response:
    request = httpx.Request(method, "http://test/v1/completions")
    return httpx.Response(status, request=request, **content)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [400, 404, 405, 413, 503])
def test_a_refusal_in_the_error_shape_is_no_failure(status: int) -> None:
    assert complaint(answer(status, json=ERROR)) is None


@pytest.mark.parametrize("status", [500, 501, 502])
def test_other_5xx_are_failures_in_any_shape(status: int) -> None:
    assert complaint(answer(status, json=ERROR)) is not None


@pytest.mark.parametrize("content", [{"detail": "no"}, [], {"error": "no"}])
def test_a_refusal_in_another_shape_is_a_failure(content: object) -> None:
    assert complaint(answer(422, json=content)) is not None


def test_an_answer_to_head_has_no_body() -> None:
    assert complaint(answer(405, "HEAD", headers={"content-type": "application/json"})) is None


def test_a_stream_has_one_end_and_no_error_of_the_server() -> None:
    done = "data: [DONE]\n\n"
    assert complaint(answer(200, text=done, headers=STREAM)) is None
    assert complaint(answer(200, text="data: {}\n\n", headers=STREAM)) is not None
    assert complaint(answer(200, text=done * 2, headers=STREAM)) is not None
    failed = f'data: {{"error": {{"type": "server_error"}}}}\n\n{done}'
    assert complaint(answer(200, text=failed, headers=STREAM)) is not None


@pytest.mark.parametrize("content", [b'{"prompt": "it\'s"}', b"\x00\xff\n", b"{" * 30_000])
def test_the_printed_command_sends_the_same_body(content: bytes) -> None:
    sent = Sent("POST", "/generate", (("content-type", "application/json"),), content)
    shown = curl("http://test", sent)
    # `curl` stands aside for one that writes what it would send.
    fake = 'curl() { for last; do :; done; [ "$last" = @- ] && cat || printf %s "$last"; }; '
    got = subprocess.run(["bash", "-c", fake + shown], capture_output=True, check=True)
    assert got.stdout == content
