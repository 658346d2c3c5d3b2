"""The service under attack: `python -m checks.service.attack [--seed S]`.

First what is too large: 18 texts of 4 MB at once, a header of 160 MB, 300 headers that never end,
250,000 content parts. Others' small requests and `/health` are answered within a second all the
while, and memory is back within half a minute. Then at least 3,000 hostile requests, 200 of them
structures: none is answered with a 5xx but 503. Then starts with damaged files in the cache.
Prints a table; the exit code is 0 if all passed.
"""

import argparse
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from checks.service.fuzz import check_log, greedy
from checks.service.fuzz_answer import Sent, complaint, curl
from checks.service.hostile import requests
from checks.service.probe import Waits, probing
from checks.service.report import Report
from checks.service.service import Service, running, tiny_pool, wait_until_idle
from specrouter.request.lanes import LONG_CHARACTERS
from test_support.cache_damage import OF_FILE, OF_FOLDER, OF_NUMBERS

_WAIT_S = 1.0  # for those who do no harm
_GROWN = 1.15  # of memory, after
_MEMORY_S = 30.0
_TEXTS, _TEXT_CHARACTERS = 18, 4_140_000
_HEADER_MB = 160
_HALF_HEADERS = 300
_PARTS = 250_000
_TOGETHER = 4  # hostile requests


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.attack", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=3200)
    parser.add_argument("--structures", type=int, default=240)
    arguments = parser.parse_args()
    report = Report(f"attack, seed {arguments.seed}")
    with running(tiny_pool()) as service:
        before = greedy(service.url)
        before_mb = service.rss_mb()
        for name, attack in _LARGE.items():
            check_large(service, report, name, attack, before_mb)
        sent = requests(arguments.requests, arguments.structures, arguments.seed)
        check_hostile(service, report, sent)
        with report.check("the service is as before"):
            wait_until_idle(service.url)
            assert greedy(service.url) == before
            check_log(service)
    check_starts(report)
    return report.show()


def check_large(
    service: Service,
    report: Report,
    name: str,
    attack: Callable[[str], Counter[str]],
    before_mb: float,
) -> None:
    with report.check(f"{name}: others are answered within {_WAIT_S:g} s") as finding:
        with probing(service.url) as waits:
            time.sleep(1)
            answers = attack(service.url)
            time.sleep(1)
        finding.text = f"{waits}; the attacker: {dict(answers)}"
        _check_waits(waits)
    with report.check(f"{name}: memory is back") as finding:
        most_mb, began_s = service.rss_mb(), time.monotonic()
        while (now_mb := service.rss_mb()) > _GROWN * before_mb:
            assert time.monotonic() - began_s < _MEMORY_S, f"{before_mb:.0f} -> {now_mb:.0f} MB"
            time.sleep(0.5)
        finding.text = f"{before_mb:.0f} MB, {most_mb:.0f} at the end, {now_mb:.0f} now"


def _check_waits(waits: Waits) -> None:
    assert waits.seconds, "the probe has not answered"
    assert not waits.failures, f"{len(waits.failures)}, the first: {waits.failures[0]}"
    assert waits.worst_s <= _WAIT_S, str(waits)


def _texts(url: str) -> Counter[str]:
    text = ("def f(x): return x + 1  # and so on; " * 120_000)[:_TEXT_CHARACTERS]
    bodies: Mapping[str, Any] = {
        "/tokenize": {"prompt": text},
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/generate": {"prompt": text, "max_new_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
    }
    paths = [*bodies] * _TEXTS
    return _together(url, [(path, json.dumps(bodies[path]).encode()) for path in paths[:_TEXTS]])


def _long_texts(url: str) -> Counter[str]:
    """Not too long to be tokenized."""
    body = json.dumps({"prompt": "some words " * (LONG_CHARACTERS // 11)}).encode()
    return _together(url, [("/tokenize", body)] * _TEXTS)


def _parts(url: str) -> Counter[str]:
    body = {"messages": [{"role": "user", "content": [{"type": ""}] * _PARTS}]}
    data = json.dumps(body, separators=(",", ":")).encode()
    return _together(url, [("/v1/chat/completions", data)] * 4)


def _together(url: str, bodies: list[tuple[str, bytes]]) -> Counter[str]:
    def post(one: tuple[str, bytes]) -> str:
        headers = {"Content-Type": "application/json"}
        with httpx.Client(timeout=300) as client:
            return str(client.post(url + one[0], content=one[1], headers=headers).status_code)

    with ThreadPoolExecutor(len(bodies)) as executor:
        return Counter(executor.map(post, bodies))


def _header(url: str) -> Counter[str]:
    with socket.create_connection(_address(url)) as connection:
        connection.settimeout(60)
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        with suppress(OSError):  # the service may have closed it
            for _ in range(_HEADER_MB):
                connection.sendall(b"y" * 2**20)
        return Counter([_status(connection)])


def _half_headers(url: str) -> Counter[str]:
    """All at once, and held until the service closes them."""
    connections = [socket.create_connection(_address(url)) for _ in range(_HALF_HEADERS)]
    for connection in connections:
        connection.settimeout(30)
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Half: ")
    statuses = Counter(_status(connection) for connection in connections)
    for connection in connections:
        connection.close()
    return statuses


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def _status(connection: socket.socket) -> str:
    try:
        answer = connection.recv(4096)
    except TimeoutError:
        return "left open"
    except OSError:
        return "closed"
    return answer.split()[1].decode() if answer else "closed"


_LARGE = {
    f"{_TEXTS} texts of 4 MB": _texts,
    f"{_TEXTS} texts that /tokenize takes": _long_texts,
    f"a header of {_HEADER_MB} MB": _header,
    f"{_HALF_HEADERS} headers that do not end": _half_headers,
    f"{_PARTS} content parts": _parts,
}


def check_hostile(service: Service, report: Report, sent: list[Sent]) -> None:
    structures = sum(b"structured_outputs" in one.content for one in sent)
    with report.check("no hostile request is a 5xx other than 503") as finding:
        with httpx.Client(base_url=service.url, timeout=120) as client:

            def send(one: Sent) -> tuple[str, str | None]:
                headers = dict(one.headers)
                answer = client.request(one.method, one.path, content=one.content, headers=headers)
                reason = complaint(answer)
                failure = reason and f"{reason}\n{curl(service.url, one)[:600]}"
                return str(answer.status_code), failure

            with ThreadPoolExecutor(_TOGETHER) as executor:
                answers = list(executor.map(send, sent))
        statuses = Counter(status for status, _ in answers)
        failures = [failure for _, failure in answers if failure]
        finding.text = f"{len(sent)}, {structures} with structures: {dict(statuses)}"
        for failure in failures[:10]:
            print(failure, flush=True)
        assert not failures, f"{len(failures)}, the first: {failures[0]}"


def check_starts(report: Report) -> None:
    """Each with several damaged files; loaders see every kind in the tests of `make test`."""
    pool = tiny_pool()
    pool["pool"]["models"][0]["inflate_to"] = 10_000_000
    kinds = {**OF_FILE, **OF_NUMBERS}
    names = sorted(kinds)
    with tempfile.TemporaryDirectory(prefix="cache-") as cache:
        environment = {"SPECROUTER_CACHE": cache}
        with running(pool, environment=environment) as service:
            wanted = greedy(service.url)
        for start, folder_kind in enumerate(("empty", "a bit in the middle", "cut to half")):
            with report.check(f"start {start + 1} with damaged files") as finding:
                # An inflated model that is made anew is timed anew: its former file is left.
                times = sorted((Path(cache) / "times").glob("*.json"))
                files = [file for file in times if file.is_file()]
                chosen = [names[(start * len(files) + i) % len(names)] for i in range(len(files))]
                for file, name in zip(files, chosen, strict=True):
                    kinds[name](file)
                [folder] = (Path(cache) / "inflated").glob("[!.]*")
                damage = OF_FOLDER.get(folder_kind)
                if damage is not None:
                    damage(folder)
                else:
                    OF_FILE[folder_kind](folder / "model.safetensors")
                finding.text = ", ".join([*chosen, f"inflated: {folder_kind}"])
                with running(pool, environment=environment) as service:
                    assert greedy(service.url) == wanted
                    log = service.log.read_text()
                    assert log.count("is made anew") == 1, log[-2000:]
                    assert "Traceback" not in log, log[-2000:]


if __name__ == "__main__":
    sys.exit(main())
