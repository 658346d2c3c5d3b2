"""Real clients against the service: `make clients`.

    python -m tests.service.clients [--venv DIR] [--only CLIENT ...]

The unmodified OpenAI client, LiteLLM, GuideLLM and lm-evaluation-harness, in an environment of
their own, ask a service that serves the bundled pool in float32 behind an API key. Prints what
passed; the exit code is 0 if everything has.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.service.environment import environment, run_checks
from tests.service.report import Report
from tests.service.service import requests_inside, running, tiny_pool, wait_until_idle

PACKAGES = ("torch", "openai", "litellm", "guidellm", "lm-eval[api]")
_CLIENTS = ("openai", "litellm", "guidellm", "lm_eval")
_KEY = "a-key-of-this-check"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.service.clients", description=__doc__)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environment there")
    parser.add_argument("--only", nargs="+", choices=_CLIENTS, default=_CLIENTS)
    arguments = parser.parse_args()
    report = Report("clients")
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches one
    os.environ["HF_HUB_OFFLINE"] = "1"
    config = tiny_pool("float32", server={"api_keys": [_KEY]})
    with (
        tempfile.TemporaryDirectory(prefix="reports-") as folder,
        environment(PACKAGES, arguments.venv) as python,
        running(config) as service,
    ):
        for name in arguments.only:
            module = f"tests.service.client_{name}"
            print(f"\n{name}", flush=True)
            run_checks(python, module, report, Path(folder), service.url, _KEY)
        with report.check("all rows are free"):
            wait_until_idle(service.url)
            assert requests_inside(service.url) == (0, 0)
        with report.check("the service stops with 0"):
            code = service.stop()
            assert code == 0, service.log_tail()
    report.show()
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
