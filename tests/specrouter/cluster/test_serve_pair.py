"""The service as a process, with a stream pair on Ray: it gives the texts of one engine, whichever
half is killed, and leaves no process behind.

Skipped where Ray is not installed; `make cluster-test` runs it in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

if importlib.util.find_spec("ray") is None:  # not imported here: it reads settings as it is
    pytest.skip("needs Ray: make cluster-test", allow_module_level=True)

from specrouter import ChainRouter, RouterConfig, SamplingParams
from tests.specrouter.cluster.streams import PATIENCE_S, PROMPT

pytestmark = pytest.mark.slow

STREAMS = 6
ASKED: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True, "temperature": 0.9}


@contextmanager
def service(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Its processes have a mark in their environments."""
    scenario = folder / "cluster.yaml"
    scenario.write_text(json.dumps(settings))
    mark = f"mark-{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, "-m", "specrouter", "serve", "--config", str(scenario), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "SPECROUTER_MARK": mark},
    )
    try:
        yield process, mark
    finally:
        process.kill()
        process.communicate()


def marked(mark: str) -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in entry.read_bytes():
                found.add(int(entry.parent.name))
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def process_of(half: str, mark: str) -> int:
    """Ray names processes by their applications."""
    found = []
    for process in marked(mark):
        try:
            name = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [process] if f"specrouter-{half}" in name else []
    [one] = found
    return one


def texts(url: str, killed: int | None = None) -> list[list[int]]:
    """Of all streams at once, by seed; a process is killed meanwhile."""

    def asked(seed: int) -> list[int]:
        body = {"input_ids": list(PROMPT), "seed": seed, **ASKED}
        answer = httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S)
        tokens: list[int] = answer.raise_for_status().json()["token_ids"]
        return tokens

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(asked, seed) for seed in range(STREAMS)]
        if killed is not None:
            time.sleep(0.2)
            os.kill(killed, signal.SIGKILL)
        return [each.result() for each in answers]


def test_a_service_with_a_pair_survives_either_half_and_leaves_no_process_behind(
    tmp_path: Path, small_config: dict[str, Any]
) -> None:
    settings = {**small_config, "cluster": {"pairs": [{"name": "p"}]}}
    with ChainRouter(RouterConfig.load(settings).replicas()["p-decode"]) as one:
        params = [SamplingParams(seed=seed, **ASKED) for seed in range(STREAMS)]
        outputs = one.generate([list(PROMPT)] * STREAMS, params)
        expected = [output.token_ids for output in outputs]
    with service(tmp_path, settings) as (process, mark):
        assert process.stdout is not None
        url = next(line for line in process.stdout if "SpecRouter serves" in line).split()[4]

        def page(path: str) -> httpx.Response:
            return httpx.get(f"{url}{path}", timeout=30)

        assert texts(url) == expected
        ready = {"status": "ok", "replicas": {"p-prefill": "ready", "p-decode": "ready"}}
        assert page("/health").json() == ready
        wait_until(lambda: "specrouter_kv_imported_tokens_total 0.0" not in page("/metrics").text)
        assert 'specrouter_replica_up{replica="p-decode"} 1.0' in page("/metrics").text
        routings = page("/router/decisions").json()["routings"]
        assert {one["replica"] for one in routings} == {"p-prefill", "p-decode"}
        for half in ("p-prefill", "p-decode"):
            wait_until(lambda: page("/health").json() == ready)
            assert texts(url, process_of(half, mark)) == expected
        assert len(marked(mark)) > 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        wait_until(lambda: not marked(mark))
