"""A service in a process of its own, started as a user starts it, and what it says of itself.

Contract: it listens on a free port, and is gone when the block ends. Memory is read from Linux.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent.parent
TARGET = "tiny-8m"
DRAFTERS = ("tiny-1m", "tiny-1m-code", "tiny-1m-math", "tiny-3m")  # weakest first
SERVE = ("-m", "specrouter", "serve")
_PATIENCE_S = 180.0


def tiny_pool(dtype: str = "auto", **sections: Any) -> dict[str, Any]:
    """The bundled pool, all members in one dtype; `sections` are added to the configuration."""
    models = [
        {"name": name, "source": f"bundled:{name}", "dtype": dtype} for name in (*DRAFTERS, TARGET)
    ]
    engine = {"max_requests": 16, "max_model_len": 1024} | sections.pop("engine", {})
    return {"pool": {"target": TARGET, "models": models}, "engine": engine, **sections}


@dataclass(frozen=True)
class Service:
    url: str
    process: "subprocess.Popen[str]"
    log: Path

    def rss_mb(self) -> float:
        """Resident memory in MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """Its exit code after SIGTERM."""
        self.signal(signal.SIGTERM)
        return self.process.wait(_PATIENCE_S)

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


@contextmanager
def running(
    config: Mapping[str, Any],
    command: Sequence[str] = SERVE,
    environment: Mapping[str, str] | None = None,
    python: Path | None = None,
) -> Iterator[Service]:
    """A service that answers. Raises `RuntimeError`, with its log's end, if it does not start.

    `python`: that it runs with; none: this one.
    """
    with tempfile.TemporaryDirectory(prefix="service-") as folder:
        file, log = Path(folder) / "config.yaml", Path(folder) / "log"
        file.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        arguments = [str(python or sys.executable), *command, "--config", str(file), "--port", "0"]
        with (
            log.open("w") as errors,
            subprocess.Popen(
                arguments,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            try:
                url = told_address(process)
                if url is None:
                    told = log.read_text(errors="replace")[-4000:]
                    raise RuntimeError(f"the service did not start:\n{told}")
                yield Service(url, process, log)
            finally:
                process.kill()


def wait_until_idle(url: str, patience_s: float = 60.0) -> None:
    """Raises `AssertionError` unless every row becomes free."""
    deadline = time.monotonic() + patience_s
    while (busy := requests_inside(url)) != (0, 0):
        assert time.monotonic() < deadline, f"{busy} requests still run and wait"
        time.sleep(0.2)


def requests_inside(url: str) -> tuple[int, int]:
    """Requests that run, and that wait."""
    return int(metric(url, "specrouter_requests_running")), int(
        metric(url, "specrouter_requests_waiting")
    )


def metric(url: str, name: str) -> float:
    """The sum over its labels."""
    page = httpx.get(f"{url}/metrics", timeout=30.0).raise_for_status().text
    samples = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    ]
    assert samples, f"the service has no metric {name}"
    return sum(samples)


def told_address(process: "subprocess.Popen[str]") -> str | None:
    """What a service prints once it listens; None: it ended before."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"http://[\d.]+:\d+", line)
        if found is not None:
            return found.group()
    return None
