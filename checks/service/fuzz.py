"""A fuzzer against the service: `make fuzz`, or `python -m checks.service.fuzz [--seed S]`.

Sends at least 10,000 requests over several connections, made from the service's own OpenAPI schema
by Schemathesis, and raw ones that no schema describes (`fuzz_requests`). No answer may be a 5xx
other than 503; in the end the service lives, is healthy, gives a greedy completion the same as
before, and has no request inside. The requests depend on the seed alone; a failing one is printed
as a curl command.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from checks.service.environment import environment
from checks.service.report import Report
from checks.service.service import ROOT, Service, running, tiny_pool, wait_until_idle

PACKAGES = ("schemathesis", "httpx")
_GREEDY = {"prompt": "def fibonacci(n):\n", "max_tokens": 48, "temperature": 0}


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=10_200)
    parser.add_argument("--connections", type=int, default=3)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environment there")
    arguments = parser.parse_args()
    report = Report(f"fuzz, seed {arguments.seed}")
    with environment(PACKAGES, arguments.venv) as python, running(tiny_pool()) as service:
        before = greedy(service.url)
        with report.check("no answer is a 5xx other than 503") as finding:
            statuses, failures = attack(python, service, arguments)
            finding.text = ", ".join(f"{count} x {name}" for name, count in statuses.items())
            for failure in failures:
                print(failure)
            assert not failures, f"{len(failures)} failures, the first: {failures[0]}"
            assert statuses.total() >= arguments.requests, f"{statuses.total()} were sent"
        with report.check("the service lives and is healthy"):
            assert service.is_running
            assert httpx.get(f"{service.url}/health", timeout=30).status_code == 200
        with report.check("all rows are free"):
            wait_until_idle(service.url)
        with report.check("a greedy completion is the same as before"):
            assert greedy(service.url) == before
        with report.check("nothing failed unseen"):
            check_log(service)
    return report.show()


def greedy(url: str) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=_GREEDY, timeout=120).raise_for_status()
    text = answer.json()["choices"][0]["text"]
    assert isinstance(text, str)
    return text


def attack(
    python: Path, service: Service, arguments: argparse.Namespace
) -> tuple[Counter[str], list[str]]:
    """Answers by status, and failures, of all connections together."""
    statuses: Counter[str] = Counter()
    failures: list[str] = []
    share = -(-arguments.requests // arguments.connections)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, ExitStack() as stack:
        saved = [Path(folder) / f"{number}.json" for number in range(arguments.connections)]
        workers = []
        for number, file in enumerate(saved):
            command: list[Any] = [python, "-m", "checks.service.fuzz_worker", service.url]
            command += [str(arguments.seed * 1000 + number), str(share), file]
            workers.append(stack.enter_context(subprocess.Popen(command, cwd=ROOT)))
        for worker in workers:
            worker.wait()
        for file in saved:
            assert file.is_file(), "a worker ended without its results"
            found = json.loads(file.read_text(encoding="utf-8"))
            statuses.update(found["statuses"])
            failures += found["failures"]
    return statuses, failures


def check_log(service: Service) -> None:
    """An exception in the service leaves a traceback, whatever the client was told."""
    log = service.log.read_text(encoding="utf-8", errors="replace")
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:2500]


if __name__ == "__main__":
    sys.exit(main())
