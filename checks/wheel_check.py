"""Installs a wheel as a user would, and serves from it: `make wheel-check`.

    python -m checks.wheel_check [--model FILE.gguf]

Builds the wheel of `make wheel`, with the C library, installs it within `constraints.txt` into an
empty environment outside of the clone, where no compiler is found. There `specrouter serve`, from
an empty directory on a free port, must say its health and a completion, and end with 0 by SIGTERM;
and kept receipts must hold: the library has the bits of one that was compiled elsewhere. No part of
the tests: it installs PyTorch, minutes, and several gigabytes with a CUDA build.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from checks.service.service import ROOT, told_address

_COPIED = ("specrouter", "processors", "statemgr", "modelpool", "configs")
_PATIENCE_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="serve this one too")
    model: Path | None = parser.parse_args().model
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as folder:
        home = Path(folder)
        wheel = build(home)
        command = install(home, wheel)
        check_service(command, home)
        receipts = sorted((ROOT / "tests" / "specrouter" / "cli").glob("*.receipt.json"))
        if model is not None:
            receipts.append(receipt_from(command, home, model.absolute()))
        for receipt in receipts:
            verify(command, home, receipt)
    print(f"the wheel installs and serves without a compiler; {len(receipts)} receipts hold")
    return 0


def build(home: Path) -> Path:
    """The wheel of a copy of the tree, so that nothing is left in the clone."""
    source = home / "source"
    source.mkdir()
    for name in _COPIED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    with_library = {**os.environ, "SPECROUTER_LIBRARY": "1"}
    command = ("wheel", "--no-deps", "--wheel-dir", home / "wheels", source)
    _pip(sys.executable, *command, environment=with_library)
    (wheel,) = (home / "wheels").glob("*.whl")
    return wheel


def without_compiler(home: Path) -> dict[str, str]:
    """The environment of commands that are tried; the cache is empty too."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
    return {**kept, "PATH": str(home / "venv" / "bin"), "SPECROUTER_CACHE": str(home / "cache")}


def install(home: Path, wheel: Path) -> Path:
    """The installed `specrouter` command."""
    subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
    python = home / "venv" / "bin" / "python"
    _pip(python, "install", "--constraint", ROOT / "constraints.txt", f"{wheel}[gguf]")
    return home / "venv" / "bin" / "specrouter"


def check_service(command: Path, home: Path) -> None:
    empty = home / "empty"
    empty.mkdir()
    with served(command, empty, home) as (url, service):
        assert httpx.get(f"{url}/health", timeout=_PATIENCE_S).json()["status"] == "ok"
        asked = {"prompt": "def fib(n):", "max_tokens": 8}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=_PATIENCE_S)
        assert answer.json()["usage"]["completion_tokens"] == 8, answer.text
        service.send_signal(signal.SIGTERM)
        code = service.wait(_PATIENCE_S)
    assert code == 0, f"the service ended with {code}"
    assert not list(empty.iterdir()), "the service left files where it was started"


def receipt_from(command: Path, home: Path, model: Path) -> Path:
    """Of a chat with a model that is not bundled, as it is served here, where there is a compiler:
    the clone's own environment makes it."""
    own = Path(sys.executable).with_name("specrouter")
    asked = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 64, "temperature": 0.8, "seed": 1, "receipt": True,
    }  # fmt: skip
    with served(own, home, None, str(model)) as (url, _):
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=_PATIENCE_S)
    file = home / "model.receipt.json"
    file.write_text(json.dumps(answer.json()))
    return file


@contextmanager
def served(
    command: Path, folder: Path, home: Path | None, *arguments: str
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    environment = None if home is None else without_compiler(home)
    line = [str(command), "serve", *arguments, "--port", "0"]
    with subprocess.Popen(
        line, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment
    ) as service:
        try:
            url = told_address(service)
            assert url is not None, "the service ended before it listened"
            yield url, service
        finally:
            service.kill()


def verify(command: Path, home: Path, receipt: Path) -> None:
    line = [str(command), "verify", str(receipt)]
    subprocess.run(line, cwd=home, check=True, env=without_compiler(home))


def _pip(
    python: str | Path, *arguments: str | Path, environment: dict[str, str] | None = None
) -> None:
    subprocess.run([python, "-m", "pip", "--quiet", *arguments], check=True, env=environment)


if __name__ == "__main__":
    sys.exit(main())
