"""Installs a wheel as a user would, and serves from it: `make wheel-check`.

    python -m checks.wheel_check

Builds the wheel, installs it within `constraints.txt` into an empty environment outside of the
clone, runs `specrouter serve` from an empty directory on a free port, asks for its health and a
completion, and stops it by SIGTERM: its exit code must be 0. No part of the tests: it installs
PyTorch, minutes, and several gigabytes with a CUDA build.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from checks.service.service import ROOT, told_address

_COPIED = ("specrouter", "processors", "statemgr", "modelpool", "configs")
_PATIENCE_S = 120.0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as folder:
        home = Path(folder)
        wheel = build(home)
        command = install(home, wheel)
        check_service(command, home)
    print("the wheel installs and serves")
    return 0


def build(home: Path) -> Path:
    """The wheel of a copy of the tree, so that nothing is left in the clone."""
    source = home / "source"
    source.mkdir()
    for name in _COPIED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    _pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", home / "wheels", source)
    (wheel,) = (home / "wheels").glob("*.whl")
    return wheel


def install(home: Path, wheel: Path) -> Path:
    """The installed `specrouter` command."""
    subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
    python = home / "venv" / "bin" / "python"
    _pip(python, "install", "--constraint", ROOT / "constraints.txt", wheel)
    return home / "venv" / "bin" / "specrouter"


def check_service(command: Path, home: Path) -> None:
    empty = home / "empty"
    empty.mkdir()
    arguments = [str(command), "serve", "--port", "0"]
    with subprocess.Popen(arguments, cwd=empty, stdout=subprocess.PIPE, text=True) as service:
        try:
            url = told_address(service)
            assert url is not None, "the service ended before it listened"
            assert httpx.get(f"{url}/health", timeout=_PATIENCE_S).json()["status"] == "ok"
            asked = {"prompt": "def fib(n):", "max_tokens": 8}
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=_PATIENCE_S)
            assert answer.json()["usage"]["completion_tokens"] == 8, answer.text
            service.send_signal(signal.SIGTERM)
            code = service.wait(_PATIENCE_S)
        finally:
            service.kill()
    assert code == 0, f"the service ended with {code}"
    assert not list(empty.iterdir()), "the service left files where it was started"


def _pip(python: str | Path, *arguments: str | Path) -> None:
    subprocess.run([python, "-m", "pip", "--quiet", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
