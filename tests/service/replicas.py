"""The tests of replicas on Ray, in an environment of their own beside the one of this process.

python -m tests.service.replicas [--venv DIR]
"""

import argparse
import sys
from pathlib import Path

from tests.service.environment import environment, run_module
from tests.service.service import ROOT

_TESTS = (
    "tests/specrouter/cluster/test_serve_link.py",
    "tests/specrouter/cluster/test_serve_pair.py",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.service.replicas", description=__doc__)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environment there")
    arguments = parser.parse_args()
    with environment(["ray[serve]"], arguments.venv, is_beside=True) as python:
        return run_module(python, "pytest", "-q", "--rootdir", str(ROOT), *_TESTS)


if __name__ == "__main__":
    sys.exit(main())
