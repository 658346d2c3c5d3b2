"""An environment of other people's packages, outside of the repository, and modules that run in it.

Contract: the service itself runs in it only where it `is_beside` its own. Versions are those of
`constraints.txt` where it has them. A folder that is given is kept, so that the next run finds it
installed.
"""

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from checks.service.report import Report
from checks.service.service import ROOT

_INSIDE = "--inside"
_MARK = "installed.txt"  # what was asked for; written last


def extra(name: str) -> list[str]:
    """What the project asks for beside its dependencies, by its `pyproject.toml`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages: list[str] = project["optional-dependencies"][name]
    return packages


def is_offered(package: str) -> bool:
    """Does any index or folder that pip asks have it, for this Python and machine?"""
    command = [sys.executable, "-m", "pip", "index", "versions", "--retries", "1", package]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def environment(
    packages: Sequence[str], kept: Path | None, constrained: bool = True, is_beside: bool = False
) -> Iterator[Path]:
    """The Python of an environment with these packages, in a folder of its own unless one is given.

    `constrained`: by `constraints.txt`. `is_beside`: what is installed for this process is seen
    there, too, so that the service can run in it. Raises `CalledProcessError` when pip does.
    """
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        home = Path(folder) if kept is None else kept
        python = home / "bin" / "python"
        mark, asked = home / _MARK, "\n".join(packages)
        if not mark.is_file() or mark.read_text(encoding="utf-8") != asked:
            print(f"installing {', '.join(packages)} into {home}", flush=True)
            subprocess.run([sys.executable, "-m", "venv", home], check=True)
            if is_beside:
                [packages_of] = (home / "lib").glob("python3*/site-packages")
                seen = (sysconfig.get_paths()["purelib"], str(ROOT))
                (packages_of / "beside.pth").write_text("\n".join(seen))
            constraints = ["--constraint", str(ROOT / "constraints.txt")] if constrained else []
            pip = [str(python), "-m", "pip", "install", "--quiet", *constraints]
            subprocess.run([*pip, *packages], check=True)
            mark.write_text(asked, encoding="utf-8")
        yield python


def run_module(python: Path, module: str, *arguments: str) -> int:
    """Its exit code; it runs in the repository's root and prints where we print."""
    command = [str(python), "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Of a program that runs again in an environment with Ray: see `run_in_cluster`."""
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps the environment there")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)


def run_in_cluster(module: str, arguments: argparse.Namespace) -> int | None:
    """The exit code of the same command there, beside what is installed here; None: it is there."""
    if arguments.inside:
        return None
    with environment(extra("cluster"), arguments.venv, is_beside=True) as python:
        return run_module(python, module, _INSIDE, *sys.argv[1:])


def run_checks(python: Path, module: str, report: Report, saved: Path, *arguments: str) -> None:
    """Runs a module that saves its report to `saved`, and includes that report."""
    code = run_module(python, module, *arguments)
    report.include(saved)
    with report.check(f"{saved.stem} ends with 0"):
        assert code == 0 or not all(check.passed for check in report.checks), f"ended with {code}"
