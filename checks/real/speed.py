"""Start, memory and speed of a released model, beside llama-server on the same machine.

    python -m checks.real.speed FILE [--llama-server PATH] [--peer-url URL] [--pairs 12]
        [--requests 1 4 8] [--prompts 64 512] [--edits 8] [--busy 0] [--draft FILE]
        [--llama-options="--spec-type ngram-simple"]

Both servers run at once and are asked in turns, A B B A; nothing else may run. The report has
medians of tokens per second and of the ratios of neighbouring turns, with the bootstrap's interval
of 95%. Decoding includes a short prompt. Drafts are off without `--draft`. `--edits N`: N agents
have files edited at once, prompts of some 300 tokens included, with what drafts by default.
`--busy N`: N programs compute meanwhile. `--peer-url`: a server that runs already, such as vLLM's.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from checks.exact.report import conditions
from checks.real.peer import (
    completed,
    llama_command,
    posted,
    served,
    specrouter_command,
    uncached,
)
from checks.real.prompts import EDITS

_PORTS = (9312, 9313)
_TOKENS, _CONTEXT = 96, 2048  # of an answer, and of a request at most
_EDIT_TOKENS = 220
_DRAWS = 2000  # of the bootstrap
_TEXT = "the quick brown fox jumps over a lazy dog near some river and tells its story"


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.real.speed", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--llama-server", type=Path, metavar="PATH")
    parser.add_argument("--peer-url", metavar="URL")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--prompts", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--edits", type=int, nargs="*", default=[])
    parser.add_argument("--llama-options", type=shlex.split, default=[], metavar="TEXT")
    parser.add_argument("--busy", type=int, default=0)
    given = parser.parse_args()
    most = max([1, *given.requests, *given.edits])
    report: dict[str, Any] = {"file": given.file.name, "busy": given.busy, **conditions()}
    options = ["--set", f"engine.kv_budget_tokens={_CONTEXT * most}"]
    options += ["--draft", str(given.draft)] if given.draft else []
    commands = {"specrouter": specrouter_command(given.file, _PORTS[0], *options)}
    if given.llama_server is not None:
        sizes = ("-c", str(_CONTEXT * most), "-np", str(most), *given.llama_options)
        commands["llama.cpp"] = llama_command(given.llama_server, given.file, _PORTS[1], *sizes)
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(served(command, port))
            for (name, command), port in zip(commands.items(), _PORTS, strict=False)
        }
        stack.enter_context(_busy(given.busy))
        urls = [one.url for one in started.values()]
        urls += [given.peer_url] if given.peer_url else []
        for count in given.requests:
            decoding = _decoding(count, given.draft is not None)
            report[f"{count} requests"] = _compared(decoding, urls, given.pairs)
        for size in given.prompts:
            report[f"prompts of {size}"] = _compared(_prompts(size), urls, given.pairs)
        for count in given.edits:
            report[f"edits by {count}"] = _compared(_edits(count), urls, given.pairs)
        for name, one in started.items():
            memory = {"rss_mb": one.memory_mb("VmRSS"), "most_mb": one.memory_mb("VmHWM")}
            report[name] = {"start_s": round(one.start_s, 1), **memory}
    print(json.dumps(report, indent=1))
    return 0


def _decoding(count: int, speculates: bool) -> Callable[[str], float]:
    def measured(url: str) -> float:
        prompts = [f"{_TEXT} {at}" for at in range(count)]
        began = time.perf_counter()

        def answer(prompt: str) -> Any:
            more = {} if speculates else {"speculation": "off"}
            return completed(url, prompt, _TOKENS, **more)

        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(answer, prompts))
        seconds = time.perf_counter() - began
        return float(sum(one["usage"]["completion_tokens"] for one in answers) / seconds)

    return measured


def _prompts(size: int) -> Callable[[str], float]:
    """Of words that are a token each, or nearly."""

    def measured(url: str) -> float:
        words, first = _TEXT.split(), time.monotonic_ns() % 997
        prompt = " ".join(words[(first + at * at) % len(words)] for at in range(size))
        began = time.perf_counter()
        answer = completed(url, prompt, 1)
        return float(answer["usage"]["prompt_tokens"] / (time.perf_counter() - began))

    return measured


def _edits(count: int) -> Callable[[str], float]:
    def measured(url: str) -> float:
        def answer(text: str) -> Any:
            messages = [{"role": "user", "content": text}]
            body = {"messages": messages, "max_tokens": _EDIT_TOKENS, "temperature": 0}
            return posted(f"{url}/v1/chat/completions", {**body, **uncached()})

        began = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(answer, EDITS[:count]))
        seconds = time.perf_counter() - began
        return float(sum(one["usage"]["completion_tokens"] for one in answers) / seconds)

    return measured


def _compared(measure: Callable[[str], float], urls: Sequence[str], pairs: int) -> dict[str, Any]:
    for url in urls:
        measure(url)
    found: list[dict[str, float]] = []
    for turn in range(pairs):
        order = urls if turn % 2 == 0 else urls[::-1]
        found.append({url: measure(url) for url in order})
    told: dict[str, Any] = {
        "tokens_per_s": [round(median(one[url] for one in found), 1) for url in urls]
    }
    if len(urls) > 1:
        ratios = np.array([one[urls[0]] / one[urls[1]] for one in found])
        draws = np.random.default_rng(0).integers(0, pairs, (_DRAWS, pairs))
        low, high = np.quantile(np.median(ratios[draws], axis=1), (0.025, 0.975))
        told["ratio"] = [round(float(one), 2) for one in (np.median(ratios), low, high)]
    return told


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Programs that compute and do nothing else."""
    loop = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(loop) for _ in range(count)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


if __name__ == "__main__":
    sys.exit(main())
