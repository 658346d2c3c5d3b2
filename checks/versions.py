"""The project with the oldest releases that it allows, and its HTTP service with the newest.

    python -m checks.versions [--venv DIR]

Oldest: every dependency of `pyproject.toml` at its floor, with the fast tests and those of what
extends uvicorn. `http/transport.py` extends its protocol and `http/serve.py` its server, which are
no public interface: uvicorn has no limit of time for a header and none of connections that spares
probes. Newest: the same tests of HTTP beside the newest FastAPI, uvicorn and httptools. Each runs
in an environment of its own, of which the first downloads PyTorch. The exit code is 0 if all pass.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

from checks.service.environment import environment, extra, run_module
from checks.service.service import ROOT

_WEB = ("fastapi", "uvicorn", "httptools")
_OF_THE_CHECKOUT = ("ruff", "mypy", "types-", "triton")  # triton: torch brings its own
_HTTP_TESTS = [
    f"tests/specrouter/http/test_{name}.py"
    for name in ("transport", "startup", "serve", "bodies", "body_limit", "guards", "openapi")
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.versions", description=__doc__)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environments there")
    kept: Path | None = parser.parse_args().venv
    tools = [one for one in extra("dev") if not one.startswith(_OF_THE_CHECKOUT)]
    oldest = [*floors(), *tools]
    with environment(oldest, kept and kept / "oldest", constrained=False) as python:
        codes = [_tests(python, "--fast"), _tests(python, *_HTTP_TESTS)]
    newest = kept and kept / "newest"
    with environment(list(_WEB), newest, constrained=False, is_beside=True) as python:
        codes.append(_tests(python, *_HTTP_TESTS))
    return max(codes)


def floors() -> list[str]:
    """Every dependency at the lowest release that is allowed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [re.match(r"([\w-]+)>=([\d.]+)", one) for one in project["dependencies"]]
    assert all(asked), "a dependency without a floor"
    return [f"{one[1]}=={one[2]}" for one in asked if one is not None]


def _tests(python: Path, *selected: str) -> int:
    return run_module(python, "pytest", "-q", "--rootdir", str(ROOT), *selected)


if __name__ == "__main__":
    sys.exit(main())
