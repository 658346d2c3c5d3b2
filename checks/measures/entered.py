"""Functions of ours that one warm streamed chat enters, and its way to the engine.

    python -m checks.measures.entered [--chats 5] [--list]

The HTTP service runs in this process with the bundled models; one chat warms it up, and each of
those after it is counted over all threads, from its arrival until a moment after its last byte.
Told are the median count of distinct functions, by package, with `--list` their names; how many of
them are entered before the engine has the chat, and the threads that it goes through until then.
Uses the public interface only, so that it runs in older work trees too. Comprehensions belong to
the function that holds them.
"""

import argparse
import http.client
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median_low
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from checks.service.streaming import served
from specrouter import ChainRouter

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("specrouter", "processors", "statemgr", "modelpool")
_OURS = tuple(f"{_ROOT / name}/" for name in _PACKAGES)
_QUEUED = "specrouter/engine/engine.py:Engine.enqueue"  # in the engine's thread
_BODY = {
    "messages": [{"role": "user", "content": "Write a function that adds two numbers."}],
    "max_tokens": 32,
    "seed": 1,
    "stream": True,
}
_AFTER_S = 0.3  # for what a chat leaves to be done after its last byte
_SWITCH_S = 10.0  # a thread goes on until it waits, so that the order of threads is the chat's


@dataclass
class Entries:
    """What is entered while `is_recording`: threads by name, functions by file and name."""

    is_recording: bool = False
    seen: list[tuple[str, str]] = field(default_factory=list)

    def hook(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_recording or event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            path, name = code.co_filename[len(str(_ROOT)) + 1 :], code.co_qualname
            if not name.endswith("comp>") and not name.endswith("<genexpr>"):
                self.seen.append((threading.current_thread().name, f"{path}:{name}"))

    def chat(self) -> "Chat":
        queued = next(at for at, (_, function) in enumerate(self.seen) if function == _QUEUED)
        way_in = [one for one in self.seen[: queued + 1] if "watch" not in one[0]]
        return Chat(
            functions=_distinct(self.seen),
            functions_before_engine=len(_distinct(way_in)),
            threads=[thread for thread, _ in groupby(way_in, key=lambda one: one[0])],
        )


@dataclass(frozen=True)
class Chat:
    """`threads`: one after the other, up to the engine's."""

    functions: list[str]
    functions_before_engine: int
    threads: list[str]


def _distinct(seen: Sequence[tuple[str, str]]) -> list[str]:
    return sorted({function for _, function in seen})


@contextmanager
def recorded(entries: Entries) -> Iterator[Entries]:
    entries.seen = []
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    entries.is_recording = True
    try:
        yield entries
        time.sleep(_AFTER_S)
    finally:
        entries.is_recording = False
        sys.setswitchinterval(interval_s)


def chat(url: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(_BODY), headers)
    answer = connection.getresponse().read()
    connection.close()
    assert answer.endswith(b"data: [DONE]\n\n"), answer[:200]


def report(chats: Sequence[Chat], is_listing: bool) -> None:
    middle = median_low(len(one.functions) for one in chats)
    functions = next(one.functions for one in chats if len(one.functions) == middle)
    packages = defaultdict[str, list[str]](list)
    for function in functions:
        packages[str(Path(function.partition(":")[0]).parent)].append(function)
    for package, names in sorted(packages.items()):
        print(f"{package:<28}{len(names):>5}")
        if is_listing:
            print(*(f"    {name}" for name in names), sep="\n")
    threads = min((one.threads for one in chats), key=len)
    result = {
        "functions": middle,
        "functions_of_chats": [len(one.functions) for one in chats],
        "functions_before_engine": min(one.functions_before_engine for one in chats),
        "thread_changes": len(threads) - 1,
        "threads": threads,
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m checks.measures.entered", description=__doc__)
    parser.add_argument("--chats", type=int, default=5)
    parser.add_argument("--list", action="store_true", help="the functions' names too")
    asked = parser.parse_args()
    entries, chats = Entries(), []
    threading.setprofile(entries.hook)
    with ChainRouter.from_config("tiny") as router, served(router) as url:
        chat(url)
        time.sleep(_AFTER_S)
        for _ in range(asked.chats):
            with recorded(entries):
                chat(url)
            chats.append(entries.chat())
    report(chats, asked.list)


if __name__ == "__main__":
    main()
