"""What the fuzzer sends, what is wrong with an answer to it, and how to send it again."""

import base64
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

# A body for each endpoint that would be served, with few tokens.
SERVED: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def f(x):", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4},
    "/generate": {"prompt": "def f(x):", "max_new_tokens": 4},
    "/tokenize": {"prompt": "def f(x):"},
    "/detokenize": {"tokens": [5, 6, 7]},
}
_ERROR_FIELDS = {"message", "type", "param", "code"}
_LONGEST_ARGUMENT = 20_000  # characters; beyond it the body comes from a pipe


@dataclass(frozen=True)
class Sent:
    """A request as it goes out."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    content: bytes


def complaint(answer: httpx.Response) -> str | None:
    """What is wrong with an answer."""
    status = answer.status_code
    if status >= 500 and status != 503:
        return f"{status}: {answer.text[:300]}"
    is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
    if is_stream and '"server_error"' in answer.text:
        return f"an error in a stream: {answer.text[-300:]}"
    if is_stream and answer.text.count("data: [DONE]\n\n") != 1:
        return f"a stream without its end: {answer.text[-300:]}"
    if status >= 400 and not _is_error_answer(answer):
        return f"{status} in another shape: {answer.text[:300]}"
    return None


def _is_error_answer(answer: httpx.Response) -> bool:
    """Of the service's shape; what is no HTTP is refused in plain text, before it gets there."""
    if answer.request.method == "HEAD" or not answer.headers["content-type"].endswith("json"):
        return answer.request.method == "HEAD" or answer.status_code == 400
    try:
        return set(answer.json()["error"]) == _ERROR_FIELDS
    except (ValueError, KeyError, TypeError):
        return False


def curl(url: str, request: Sent) -> str:
    """A command that sends the same; a body that a shell cannot hold comes from base64."""
    parts = ["curl", "-sS", "-X", request.method, url + request.path]
    for name, value in request.headers:
        parts += ["-H", f"{name}: {value}"]
    try:
        text = request.content.decode()
        if len(text) > _LONGEST_ARGUMENT or "\0" in text:
            raise ValueError
    except ValueError:
        spelled = base64.b64encode(request.content).decode()
        return f"echo {spelled} | base64 -d | {shlex.join([*parts, '--data-binary', '@-'])}"
    return shlex.join([*parts, "--data-raw", text])
