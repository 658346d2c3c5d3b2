"""The clients that are checked, and what runs one of them in the environment that has it.

    python -m checks.service.client NAME URL KEY OUT

Saves its report to OUT. A client's checks are the pairs that `NAME_checks` yields: what is checked,
and a call that raises unless it holds; text that the call returns is shown beside it. The service
has the API key, and serves greedily the same text however it is asked.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from checks.service.report import Report

MODEL = "tiny-8m"
TARGET = Path(__file__).resolve().parents[2] / "modelpool" / "bundled" / MODEL

Checks = Iterator[tuple[str, Callable[[], object]]]


@dataclass(frozen=True)
class Client:
    """Attributes:
    package: whose version is told.
    module: that has its checks.
    needs: packages of its environment; empty for the one above alone.
    constrained: by our versions, where they have a say.
    """

    package: str
    module: str
    needs: tuple[str, ...] = ()
    constrained: bool = True


CLIENTS: Mapping[str, Client] = {
    "openai": Client("openai", "client_openai", ("openai", "jsonschema")),
    "litellm": Client("litellm", "client_litellm"),
    "guidellm": Client("guidellm", "client_benchmarks", ("torch", "guidellm")),
    "lm_eval": Client("lm_eval", "client_lm_eval", ("torch", "transformers", "lm-eval[api]")),
    "instructor": Client("instructor", "client_frameworks"),
    "pydantic_ai": Client("pydantic-ai-slim", "client_frameworks", ("pydantic-ai-slim[openai]",)),
    "langchain": Client("langchain-openai", "client_frameworks"),
    "llama_index": Client("llama-index-llms-openai-like", "client_frameworks"),
    "aiperf": Client("aiperf", "client_benchmarks", constrained=False),
}


def main(name: str, url: str, key: str, saved: Path) -> int:
    client = CLIENTS[name]
    report = Report(f"{client.package} {version(client.package)}")
    module = import_module(f"checks.service.{client.module}")
    checks: Checks = getattr(module, f"{name}_checks")(url, key)
    for what, check in checks:
        with report.check(what) as finding:
            told = check()
            finding.text = told if isinstance(told, str) else ""
    report.save(saved)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
