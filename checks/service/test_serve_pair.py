"""The service as a process, with a stream pair on Ray: it gives the texts of one engine, whichever
half is killed, and leaves no process behind.

Skipped where Ray is not installed; `make cluster-test` runs it in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

if importlib.util.find_spec("ray") is None:  # not imported here: it reads settings as it is
    pytest.skip("needs Ray: make cluster-test", allow_module_level=True)

from checks.service.replicas import marked
from checks.service.service import running
from specrouter import ChainRouter, RouterConfig, SamplingParams
from test_support.cluster_streams import PATIENCE_S, PROMPT, wait_until

pytestmark = pytest.mark.slow

STREAMS = 6
_MARK = "SPECROUTER_PAIR_MARK"
ASKED: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True, "temperature": 0.9}


def process_of(half: str, mark: str) -> int:
    """Ray names processes by their applications."""
    [one] = [
        process for process, name in marked(_MARK, mark).items() if f"specrouter-{half}" in name
    ]
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
    small_config: dict[str, Any],
) -> None:
    settings = {**small_config, "cluster": {"pairs": [{"name": "p"}]}}
    with ChainRouter(RouterConfig.load(settings).replicas()["p-decode"]) as one:
        params = [SamplingParams(seed=seed, **ASKED) for seed in range(STREAMS)]
        outputs = one.generate([list(PROMPT)] * STREAMS, params)
        expected = [output.token_ids for output in outputs]
    mark = f"mark-{uuid.uuid4().hex}"
    with running(settings, environment={_MARK: mark}) as service:
        url = service.url

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
        assert len(marked(_MARK, mark)) > 3
        assert service.stop() == 0
        wait_until(lambda: not marked(_MARK, mark))
