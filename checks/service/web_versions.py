"""The HTTP service with the oldest and the newest releases of what it is built on.

    python -m checks.service.web_versions [--venv DIR]

`http/transport.py` extends uvicorn's protocol and `http/serve.py` its server, which are no public
interface: uvicorn has no limit of time for a header and none of connections that spares probes. So
their tests run with the lowest versions that `pyproject.toml` allows, and with the newest there
are, each in an environment of its own beside this one. The exit code is 0 if all pass.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

from checks.service.environment import environment, run_module
from checks.service.service import ROOT

_PACKAGES = ("fastapi", "uvicorn", "httptools")
_TESTS = [
    f"tests/specrouter/http/test_{name}.py"
    for name in ("transport", "startup", "serve", "bodies", "body_limit", "guards", "openapi")
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.web_versions", description=__doc__)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environments there")
    kept = parser.parse_args().venv
    code = 0
    for name, packages in (("floor", floors()), ("newest", list(_PACKAGES))):
        print(f"{name}: {', '.join(packages)}", flush=True)
        folder = kept and kept / name
        with environment(packages, folder, constrained=False, is_beside=True) as python:
            code = code or run_module(python, "pytest", "-q", "--rootdir", str(ROOT), *_TESTS)
    return code


def floors() -> list[str]:
    """The lowest releases of the packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [re.fullmatch(r"([\w-]+)>=([\d.]+)", one) for one in project["dependencies"]]
    return [f"{one[1]}=={one[2]}" for one in asked if one is not None and one[1] in _PACKAGES]


if __name__ == "__main__":
    sys.exit(main())
