"""The tests of replicas on Ray: `make cluster-test`.

    python -m checks.service.replicas [--venv DIR] [--where-ray-is-offered]

They run in an environment of their own beside the one of this process, with the `cluster` extra. No
process may be left when they have ended. The exit code is 0 if everything passed.
"""

import argparse
import os
import sys
import time
import uuid
from pathlib import Path

from checks.service.environment import environment, extra, is_offered, run_module
from checks.service.service import ROOT

_TESTS = (
    "tests/specrouter/cluster/test_serve_link.py",
    "checks/service/test_serve_pair.py",
)
_AIM_S = 120.0
_END_S = 15.0  # for what Ray has started to end
_MARK = "SPECROUTER_TEST_MARK"  # processes inherit it
_SKIPPED = """\
SKIPPED: make cluster-test. No package index that pip asks here has Ray for this Python: nothing was
tested of replicas in processes of their own. Their tests within one process have run with the rest.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.replicas", description=__doc__)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environment there")
    parser.add_argument("--where-ray-is-offered", action="store_true", help="else says so, passes")
    arguments = parser.parse_args()
    if arguments.where_ray_is_offered and not is_offered("ray"):
        print(_SKIPPED, end="", flush=True)
        return 0
    with environment(extra("cluster"), arguments.venv, is_beside=True) as python:
        os.environ[_MARK] = mark = uuid.uuid4().hex
        began_s = time.monotonic()
        code = run_module(python, "pytest", "-q", "--rootdir", str(ROOT), *_TESTS)
        took_s = time.monotonic() - began_s
        del os.environ[_MARK]
        print(f"the tests on Ray took {took_s:.0f} s (aim: at most {_AIM_S:.0f} s)")
        left = _left_behind(mark)
    for process, command in left.items():
        print(f"a process is left behind: {process} {command}")
    return code or int(bool(left))


def _left_behind(mark: str) -> dict[int, str]:
    """Processes that still run after a while."""
    until_s = time.monotonic() + _END_S
    while (found := marked(_MARK, mark)) and time.monotonic() < until_s:
        time.sleep(0.2)
    return found


def marked(name: str, mark: str) -> dict[int, str]:
    """Commands of the processes that have this in their environment, by number; none where there is
    no /proc."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{name}={mark}".encode() in (entry / "environ").read_bytes():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace")
        except OSError:
            continue  # it has ended, or is another user's
    return found


if __name__ == "__main__":
    sys.exit(main())
