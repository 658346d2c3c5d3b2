"""Real clients against the service: `make clients`.

    python -m tests.service.clients [--venv DIR] [--only CLIENT ...]

The unmodified OpenAI client, LiteLLM, GuideLLM, lm-evaluation-harness, Instructor, Pydantic AI,
LangChain, LlamaIndex and AIPerf, in environments of their own, ask a service that serves the
bundled pool in float32 behind an API key. Prints what passed; the exit code is 0 if everything has.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.service.environment import environment, run_checks
from tests.service.report import Report
from tests.service.service import requests_inside, running, tiny_pool, wait_until_idle


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.service.clients", description=__doc__)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environments there")
    parser.add_argument("--only", nargs="+", choices=_CLIENTS, default=_CLIENTS)
    arguments = parser.parse_args()
    report = Report("clients")
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches one
    os.environ["HF_HUB_OFFLINE"] = "1"
    config = tiny_pool("float32", server={"api_keys": [_KEY]})
    with (
        tempfile.TemporaryDirectory(prefix="reports-") as folder,
        running(config) as service,
    ):
        for name, group in GROUPS.items():
            asked = [client for client in group.clients if client in arguments.only]
            if asked:
                kept = arguments.venv and arguments.venv / name
                with environment(group.packages, kept, group.constrained) as python:
                    check_clients(asked, python, report, Path(folder), service.url)
        with report.check("all rows are free"):
            wait_until_idle(service.url)
            assert requests_inside(service.url) == (0, 0)
        with report.check("the service stops with 0"):
            code = service.stop()
            assert code == 0, service.log_tail()
    report.show()
    return 0 if report.passed else 1


def check_clients(
    clients: Sequence[str], python: Path, report: Report, folder: Path, url: str
) -> None:
    """Those of one environment."""
    for client in clients:
        print(f"\n{client}", flush=True)
        run_checks(python, f"tests.service.client_{client}", report, folder, url, _KEY)


if __name__ == "__main__":
    sys.exit(main())
