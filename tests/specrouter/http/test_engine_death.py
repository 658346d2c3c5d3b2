"""An engine that dies under `specrouter serve`: clients hear of it, a supervisor restarts it."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.specrouter.faults import PATIENCE_S

POOL = {"target": "tiny-1m", "models": [{"name": "tiny-1m", "source": "bundled:tiny-1m"}]}
ASKED = {"prompt": "def f", "ignore_eos": True, "max_new_tokens": 400}
STEP_TIMEOUT_S = 5.0
LAST = 3  # cycles that the first process runs

# The first process fails or hangs once it has run some cycles while another request waits.
_PLANTED = """
import runpy, sys, time
from pathlib import Path
from specrouter.engine.step import DecodingStep

mark, how, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
run, is_first = DecodingStep.run, not mark.exists()
mark.touch()

def planted(step):
    run(step)
    if is_first and step.cycle >= last and step._book.waiting:
        if how == "fails":
            raise RuntimeError("planted")
        time.sleep(10_000)

DecodingStep.run = planted
sys.argv[1:] = sys.argv[4:]
runpy.run_module("specrouter", run_name="__main__")
"""


@contextmanager
def supervised(folder: Path, how: str) -> Iterator["subprocess.Popen[str]"]:
    """A service that is started again whenever it exits with 3, as `Restart=on-failure` does."""
    config = folder / "config.yaml"
    engine = {"max_requests": 1, "step_timeout_s": STEP_TIMEOUT_S}
    config.write_text(json.dumps({"pool": POOL, "engine": engine, "server": {"port": 0}}))
    service = [sys.executable, "-c", _PLANTED, str(folder / "mark"), how, str(LAST)]
    command = shlex.join([*service, "serve", "--config", str(config)])
    loop = f"while {command}; code=$?; [ $code -ne 0 ]; do echo ended $code; done"
    process = subprocess.Popen(
        ["/bin/sh", "-c", loop],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def announced(process: "subprocess.Popen[str]") -> str:
    """The address of the service that starts next."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("SpecRouter serves"):
            return line.split()[4]
    raise AssertionError("no service has started")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("fails", "planted"),
        pytest.param("hangs", "a cycle has taken more than 5 s", marks=pytest.mark.exact),
    ],
)
def test_each_request_hears_of_it_the_process_exits_with_3_and_the_next_one_answers(
    tmp_path: Path, how: str, cause: str
) -> None:
    with supervised(tmp_path, how) as process, httpx.Client(timeout=PATIENCE_S) as client:
        url = announced(process)
        streams = [{**ASKED, "stream": True}, {**ASKED, "stream": True}]
        events: list[list[Any]] = []
        with (
            client.stream("POST", f"{url}/generate", json=streams[0]) as runs,
            client.stream("POST", f"{url}/v1/completions", json=chat_of(streams[1])) as waits,
        ):
            for stream in (runs, waits):
                lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
                events.append([json.loads(line) for line in lines if line != "[DONE]"])
        for error in (events[0][-1]["error"], events[1][-1]["error"]):
            assert error["code"] == "engine_dead"
            assert cause in error["message"]
            assert "/health" in error["message"], "it says what to do"
        assert len(events[0]) > LAST - 1, "what it had came first"
        assert process.stdout is not None
        assert next(line for line in process.stdout if line.startswith("ended")) == "ended 3\n"
        answer = client.post(f"{announced(process)}/generate", json=ASKED)
        assert answer.status_code == 200


def chat_of(body: dict[str, Any]) -> dict[str, Any]:
    known = {name: value for name, value in body.items() if name != "max_new_tokens"}
    return {**known, "max_tokens": body["max_new_tokens"], "model": "tiny-1m"}
