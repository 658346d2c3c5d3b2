"""The package's names come when they are used; `--help` and errors wait for no import."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import modelpool
import specrouter

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "from specrouter.cli.main import main\nsys.exit(main(sys.argv[1:]))"


def test_every_name_is_there_and_listed() -> None:
    for name in specrouter.__all__:
        assert getattr(specrouter, name) is not None
        assert name in dir(specrouter)
    assert specrouter.ConfigError is modelpool.ConfigError


@pytest.mark.parametrize("package", [specrouter, modelpool])
def test_another_name_is_an_attribute_error(package: object) -> None:
    with pytest.raises(AttributeError, match="Missing"):
        _ = package.Missing  # type: ignore[attr-defined]


def ran(script: str, *argv: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which prints the slow modules that it has imported at last."""
    whole = (
        f"import sys\ntry:\n{textwrap.indent(script, '    ')}\nfinally:\n"
        "    slow = {'torch', 'transformers', 'numpy', 'pydantic', 'fastapi', 'huggingface_hub'}\n"
        "    print(sorted(slow & sys.modules.keys()))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", whole, *argv], cwd=folder, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def slow_imports(done: subprocess.CompletedProcess[str]) -> set[str]:
    return set(ast.literal_eval(done.stdout.splitlines()[-1]))


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
    done = ran(COMMAND, *argv)
    assert done.returncode == code, done.stderr
    assert not slow_imports(done)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a wrong kind."""
    folder = tmp_path_factory.mktemp("wrong")
    for name in ("damaged.gguf", "model.safetensors", "binary.yaml"):
        (folder / name).write_bytes(b"\xff\0" * 9)
    (folder / "broken.yaml").write_text("pool: {")
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(
    ("argv", "named", "told"),
    [
        ("serve absent.gguf", "TARGET", "no such file; in this folder: damaged.gguf"),
        ("serve away/a.gguf", "TARGET", "there is no folder"),
        ("serve damaged.gguf", "TARGET", "no GGUF file"),
        ("serve empty", "TARGET", "no config.json"),
        ("serve ./absent", "TARGET", "no directory"),
        ("serve model.safetensors", "TARGET", "give the folder"),
        ("serve broken.yaml", "TARGET", "not YAML"),
        ("serve --config binary.yaml", "--config", "not UTF-8"),
        ("serve nothing-here", "TARGET", "bundled are"),
        ("serve some/model", "TARGET", "HF_HUB_OFFLINE is set"),
        ("serve some/model:Q4_K_M", "TARGET", "HF_HUB_OFFLINE is set"),
        ("serve tiny-8m --draft absent.gguf", "--draft absent.gguf", "no such file"),
        ("serve tiny-8m --draft model.safetensors", "--draft model.safetensors", "is a file"),
        ("serve tiny --max-requests 0", "--max-requests", "greater than"),
        ("serve tiny --set engine.rows=3", "--set engine.rows", "unknown key"),
        ("check tiny --set engine.max_requests=x", "--set engine.max_requests", "integer"),
        ("pairs empty", "TARGET", "no config.json"),
        ("bench chains --config absent.yaml", "--config", "cannot read"),
        ("bench chains --prompts absent.jsonl", "--prompts", "absent.jsonl"),
        ("generate p --temperature -1", "temperature", "-1"),
        ("generate p --config absent.yaml", "--config", "cannot read"),
        ("generate p --config damaged.gguf", "--config", "no GGUF file"),
        ("generate absent.gguf p", "TARGET", "no such file; in this folder: damaged.gguf"),
        ("bench turns absent.gguf", "TARGET", "no such file"),
        ("generate p --chain nope,tiny-8m", "--chain", "'nope' is not in the pool"),
        ("generate p --chain tiny-8m,tiny-1m", "--chain", "must end in the target"),
        ("generate p --slo-class nope", "--slo-class", "'nope' is no class"),
        ("generate p --no-speculation --depth 3", "--depth", "means nothing"),
    ],
)
def test_what_is_wrong_with_arguments_is_one_line_before_a_framework_is_imported(
    argv: str, named: str, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = ran(COMMAND, *argv.split(), folder=folder)
    assert done.returncode == 2
    assert done.stderr.startswith(f"specrouter: {named}: ")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert not {"torch", "transformers", "fastapi"} & slow_imports(done)


def test_a_port_in_use_is_told_before_a_framework_is_imported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = ran(COMMAND, "serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert done.stderr.startswith("specrouter: --port: cannot listen on 127.0.0.1:")
    assert "torch" not in slow_imports(done)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("LLM('absent.gguf')", "target: .* no such file"),
        ("LLM('tiny-8m', draft='./absent')", "draft ./absent: no directory"),
        ("LLM(max_tokens=3)", "max_tokens: is no option"),
        ("LLM(set={'engine.rows': 3})", "set engine.rows: unknown key"),
    ],
)
def test_what_is_wrong_with_an_llm_is_told_before_a_framework_is_imported(
    call: str, told: str, folder: Path
) -> None:
    done = ran(f"from specrouter import LLM\n{call}", folder=folder)
    assert re.search(f"ConfigError: {told}", done.stderr)
    assert "torch" not in slow_imports(done)
