"""Real clients against the service: `make clients`.

    python -m checks.service.clients [--venv DIR] [--only CLIENT ...] [--cluster replicas|pair]

The unmodified OpenAI client, LiteLLM, GuideLLM, lm-evaluation-harness, Instructor, Pydantic AI,
LangChain, LlamaIndex and AIPerf, in environments of their own, ask a service that serves the
bundled pool in float32 behind an API key, with `--cluster` by two replicas or by a stream pair, for
which Ray is installed beside it. Prints what passed; the exit code is 0 if everything has.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checks.service.client import CLIENTS
from checks.service.environment import environment, extra, run_checks
from checks.service.report import Report
from checks.service.service import Service, running, tiny_pool, wait_until_idle

_KEY = "a-key-of-this-check"
_CLUSTERS: Mapping[str, Mapping[str, Any]] = {
    "replicas": {"replicas": [{"name": "r", "count": 2}]},
    "pair": {"pairs": [{"name": "p"}]},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.clients", description=__doc__)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environments there")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--cluster", choices=_CLUSTERS, help="who serves; else one engine")
    arguments = parser.parse_args()
    report = Report("clients")
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches one
    os.environ["HF_HUB_OFFLINE"] = "1"
    with (
        tempfile.TemporaryDirectory(prefix="reports-") as folder,
        _service(arguments.cluster, arguments.venv) as service,
    ):
        for name in arguments.only:
            print(f"\n{name}", flush=True)
            client, kept = CLIENTS[name], arguments.venv and arguments.venv / name
            needs = client.needs or (client.package,)
            saved = Path(folder) / f"{name}.json"
            with environment(needs, kept, client.constrained) as python:
                asked = (name, service.url, _KEY, str(saved))
                run_checks(python, "checks.service.client", report, saved, *asked)
        with report.check("all rows are free"):
            wait_until_idle(service.url)
        with report.check("the service stops with 0"):
            code = service.stop()
            assert code == 0, service.log_tail()
    return report.show()


@contextmanager
def _service(cluster: str | None, kept: Path | None) -> Iterator[Service]:
    """`cluster`: who serves, one of `_CLUSTERS`; none: one engine."""
    config = tiny_pool("float32", server={"api_keys": [_KEY]})
    if cluster is None:
        with running(config) as service:
            yield service
        return
    config["cluster"] = dict(_CLUSTERS[cluster])
    folder = kept and kept / "cluster"
    with (
        environment(extra("cluster"), folder, is_beside=True) as python,
        running(config, python=python) as service,
    ):
        yield service


if __name__ == "__main__":
    sys.exit(main())
