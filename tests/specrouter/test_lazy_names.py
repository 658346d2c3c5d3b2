"""The package's names come when they are used; `--help` and errors wait for no import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import modelpool
import specrouter

ROOT = Path(__file__).resolve().parents[2]


def test_every_name_is_there_and_listed() -> None:
    for name in specrouter.__all__:
        assert getattr(specrouter, name) is not None
        assert name in dir(specrouter)
    assert specrouter.ConfigError is modelpool.ConfigError


@pytest.mark.parametrize("package", [specrouter, modelpool])
def test_another_name_is_an_attribute_error(package: object) -> None:
    with pytest.raises(AttributeError, match="Missing"):
        _ = package.Missing  # type: ignore[attr-defined]


def ran(*argv: str) -> subprocess.CompletedProcess[str]:
    """`specrouter ARGV`, and the slow modules that it has imported as its last line."""
    script = (
        "import sys\n"
        "from specrouter.cli.main import main\n"
        "try:\n    code = main(sys.argv[1:])\n"
        "except SystemExit as end:\n    code = end.code\n"
        "slow = {'torch', 'transformers', 'numpy', 'pydantic', 'fastapi', 'huggingface_hub'}\n"
        "print(sorted(slow & sys.modules.keys()))\n"
        "sys.exit(code)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["serve", "--help"], 0),
        (["bench", "load", "--help"], 0),
        (["serve", "--port", "x"], 2),
        (["generate"], 2),
    ],
)
def test_help_and_argument_errors_import_nothing_slow(argv: list[str], code: int) -> None:
    done = ran(*argv)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "tiny", "--max-requests", "0"],
        ["serve", "nothing-here"],
        ["generate", "p", "--temperature", "-1"],
        ["generate", "p", "--config", "missing.yaml"],
        ["generate", "p", "--no-speculation", "--depth", "3"],
    ],
)
def test_errors_of_the_configuration_import_no_framework(argv: list[str]) -> None:
    done = ran(*argv)
    assert done.returncode == 2
    imported = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert not {"torch", "transformers", "fastapi"} & imported
