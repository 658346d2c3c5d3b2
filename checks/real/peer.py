"""This project's server and llama.cpp's, each in a process of its own."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_S, _ANSWER_S = 600.0, 600.0


@dataclass(frozen=True)
class Server:
    """`start_s`: to the first answer."""

    url: str
    pid: int
    start_s: float

    def memory_mb(self, which: str) -> int:
        """`VmRSS`: resident now; `VmHWM`: the most so far."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(status.split(f"{which}:")[1].split()[0]) // 1024


def specrouter_command(file: Path, port: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "specrouter", "serve", str(file), "--port", str(port), *options]


def llama_command(path: Path, file: Path, port: int, *options: str) -> list[str]:
    threads = str(os.cpu_count())
    return [str(path), "-m", str(file), "--port", str(port), "-t", threads, "-fa", "on", *options]


@contextmanager
def served(
    command: Sequence[str], port: int, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Raises `RuntimeError` where it does not start."""
    url, began = f"http://127.0.0.1:{port}", time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        while not _is_up(url):
            if process.poll() is not None or time.monotonic() - began > _START_S:
                raise RuntimeError(f"{command[0]} did not start")
            time.sleep(0.1)
        completed(url, "Hello", 1)
        start_s = time.monotonic() - began
        while b'"loading"' in _health(url):  # drafters that come after the target
            time.sleep(0.1)
        yield Server(url, process.pid, start_s)
    finally:
        process.terminate()
        process.wait()


def posted(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        return json.load(answer)


def uncached() -> dict[str, Any]:
    """Of a request that reads its whole prompt; llama.cpp's name for it, and ours."""
    return {"cache_prompt": False, "cache_salt": str(time.monotonic_ns())}


def completed(url: str, prompt: str, tokens: int, **more: Any) -> Any:
    """A greedy completion of so many tokens, without a prefix cache."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return posted(f"{url}/v1/completions", {**body, **uncached(), **more})


def _is_up(url: str) -> bool:
    try:
        return bool(_health(url))
    except (urllib.error.URLError, OSError):
        return False


def _health(url: str) -> bytes:
    with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
        found: bytes = answer.read()
    return found
