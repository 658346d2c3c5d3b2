"""One of the fuzzer's connections.

    python -m checks.service.fuzz_worker URL SEED COUNT OUT

Runs in an environment that has `schemathesis`. The same seed sends the same requests. What is a
failure: an answer of 500 or above that is not a 503, a 4xx that is not in the service's error
shape, or no answer at all. Saves the counts by status, and each failure as a curl command.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from checks.service.fuzz_answer import Sent, complaint, curl
from checks.service.fuzz_requests import every_request

_BATCH = 250  # requests between two lines of progress
_PATIENCE_S = 120.0
_FAILURES = 20  # enough to stop


class Worker:
    def __init__(self, url: str, seed: int) -> None:
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []
        self._url, self._seed = url, seed
        self._client = httpx.Client(base_url=url, timeout=_PATIENCE_S)
        self._strategy = every_request(schemathesis.openapi.from_url(f"{url}/openapi.json"))

    def run(self, count: int) -> None:
        began_s, batch = time.monotonic(), 0
        while (sent := self.statuses.total()) < count and len(self.failures) < _FAILURES:
            self._run_batch(self._seed + 1_000_003 * batch, min(_BATCH, count - sent))
            batch += 1
            rate = self.statuses.total() / (time.monotonic() - began_s)
            print(
                f"  seed {self._seed}: {self.statuses.total()} of {count}, {rate:.0f} a second, "
                f"{len(self.failures)} failures",
                flush=True,
            )

    def _run_batch(self, seed: int, count: int) -> None:
        @hypothesis.seed(seed)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(self._strategy)
        def send(request: Sent) -> None:
            self._send(request)

        send()

    def _send(self, request: Sent) -> None:
        headers = [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in request.headers
        ]
        try:
            built = self._client.build_request(
                request.method, request.path, headers=headers, content=request.content
            )
        except (httpx.InvalidURL, ValueError):
            self.statuses["not sendable"] += 1
            return
        try:
            answer = self._client.send(built)
        except httpx.LocalProtocolError:
            self.statuses["not sendable"] += 1  # h11 refuses such a header
            return
        except httpx.HTTPError as error:
            self._fail(request, f"no answer: {error!r}")
            return
        self.statuses[str(answer.status_code)] += 1
        reason = complaint(answer)
        if reason is not None:
            self._fail(request, reason)

    def _fail(self, request: Sent, reason: str) -> None:
        self.failures.append(f"{reason}\n{curl(self._url, request)}")
        print(f"FAILURE {self.failures[-1]}", flush=True)


def main(url: str, seed: int, count: int, saved: Path) -> int:
    worker = Worker(url, seed)
    worker.run(count)
    saved.write_text(json.dumps({"statuses": worker.statuses, "failures": worker.failures}))
    return 1 if worker.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
