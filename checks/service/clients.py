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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.service.environment import environment, extra, run_checks
from checks.service.report import Report
from checks.service.service import Service, running, tiny_pool, wait_until_idle


@dataclass(frozen=True)
class Group:
    """Clients of one environment. `constrained`: by our versions, where they have a say."""

    packages: tuple[str, ...]
    clients: tuple[str, ...]
    constrained: bool = True


# Frameworks ask for different versions of `openai`, AIPerf for others of what the service uses.
GROUPS: Mapping[str, Group] = {
    "benchmarks": Group(
        ("torch", "openai", "litellm", "guidellm", "lm-eval[api]"),
        ("openai", "litellm", "guidellm", "lm_eval"),
    ),
    "openai_tools": Group(("openai", "jsonschema"), ("openai_tools",)),
    "instructor": Group(("instructor",), ("instructor",)),
    "pydantic_ai": Group(("pydantic-ai-slim[openai]",), ("pydantic_ai",)),
    "langchain": Group(("langchain-openai",), ("langchain",)),
    "llama_index": Group(("llama-index-llms-openai-like",), ("llama_index",)),
    "aiperf": Group(("aiperf",), ("aiperf",), constrained=False),
}
_CLIENTS = [client for group in GROUPS.values() for client in group.clients]
_KEY = "a-key-of-this-check"
_CLUSTERS: Mapping[str, Mapping[str, Any]] = {
    "replicas": {"replicas": [{"name": "r", "count": 2}]},
    "pair": {"pairs": [{"name": "p"}]},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.clients", description=__doc__)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environments there")
    parser.add_argument("--only", nargs="+", choices=_CLIENTS, default=_CLIENTS)
    parser.add_argument("--cluster", choices=_CLUSTERS, help="who serves; else one engine")
    arguments = parser.parse_args()
    report = Report("clients")
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches one
    os.environ["HF_HUB_OFFLINE"] = "1"
    with (
        tempfile.TemporaryDirectory(prefix="reports-") as folder,
        _service(arguments.cluster, arguments.venv) as service,
    ):
        for name, group in GROUPS.items():
            asked = [client for client in group.clients if client in arguments.only]
            if asked:
                kept = arguments.venv and arguments.venv / name
                with environment(group.packages, kept, group.constrained) as python:
                    check_clients(asked, python, report, Path(folder), service.url)
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


def check_clients(
    clients: Sequence[str], python: Path, report: Report, folder: Path, url: str
) -> None:
    """Those of one environment."""
    for client in clients:
        print(f"\n{client}", flush=True)
        run_checks(python, f"checks.service.client_{client}", report, folder, url, _KEY)


if __name__ == "__main__":
    sys.exit(main())
