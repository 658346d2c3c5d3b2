"""What README and docs/ tell a reader to type works, as it is written.

Commands run in this process: `specrouter` and `python -m` as the functions that they call, `curl`
against an application in memory that serves the bundled models, as `make serve` does. Those that
cannot run here stand in `NOT_RUN`, each with its reason; a command that is in neither fails.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specrouter import ChainRouter, RouterConfig
from specrouter.cli.main import main
from tests.pages import ROOT, Command, Snippet, commands, snippets
from tests.specrouter.http.client import request

# Patterns of whole commands.
NOT_RUN = {
    r"make .*": "sets up an environment; the targets are this suite and the commands below",
    r"(\S*/)?(pip|uv) .*": "installs packages",
    r"sudo .*|docker .*|kubectl .*|git .*": "changes the machine, or needs another program",
    r"(export|echo|cd) .*": "is the shell's own",
    r"(\S*/)?specrouter serve\b.*": "runs until it is stopped; test_serve.py starts it",
    r".* --config (qwen|llama)\S*.*": "downloads a model",
    r"(\S*/)?specrouter chat\b.*": "talks until its input ends; test_chat.py does",
    r".*examples\.openai_client\b.*": "needs a package that is not installed here",
    r".*-m tests\..*": "is a long check itself: `make exact`, or a target of the Makefile",
}
# They take long: `make checks` runs them. test_examples.py runs the examples on less.
LONG = (
    r".*\b(bench (chains|load)|inflate)\b.*|.*bench-cpu.*"
    r"|.*examples\..*"
)
# That a page has as an example of a reader's own.
OWN_FILES: dict[str, Path | str] = {
    "my.yaml": ROOT / "configs" / "tiny.yaml",
    "my.jsonl": '{"prompt": "def fib(n):"}\n{"prompt": "The sea"}\n',
}


def matches(pattern: str, command: Command) -> bool:
    return re.fullmatch(pattern, shlex.join(command.words), re.DOTALL) is not None


def marked(command: Command) -> object:
    marks = pytest.mark.long if matches(LONG, command) else ()
    return pytest.param(command, marks=marks, id=str(command))


RUN = [
    marked(one)
    for one in dict.fromkeys(commands())
    if not any(matches(pattern, one) for pattern in NOT_RUN)
]


@pytest.fixture(scope="module")
def router() -> Iterator[ChainRouter]:
    with ChainRouter.from_config(ROOT / "configs" / "tiny.yaml") as router:
        yield router


@pytest.fixture(autouse=True)
def one_router(router: ChainRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the bundled models gets one router, which stays open."""
    opened, closed = ChainRouter.from_config, ChainRouter.close

    def from_config(source: Any, *progress: Any, **later: Any) -> ChainRouter:
        config = RouterConfig.load(source)
        return router if config == router.config else opened(config, *progress, **later)

    def close(one: ChainRouter, *patience_s: float) -> None:
        if one is not router:
            closed(one, *patience_s)

    monkeypatch.setattr(ChainRouter, "from_config", from_config)
    monkeypatch.setattr(ChainRouter, "close", close)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a command is typed: the checkout, with files of the reader's own."""
    for name in ("configs", "docs", "examples", "modelpool", "research"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, content in OWN_FILES.items():
        if isinstance(content, Path):
            shutil.copy(content, tmp_path / name)
        else:
            (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", RUN)
@pytest.mark.usefixtures("folder")
def test_a_command_of_the_documents_runs(
    command: Command, router: ChainRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *rest = command.words
    if program == "curl":
        ask(router, rest)
        return
    words = [name.replace("/tmp/", f"{os.getcwd()}/") for name in rest]
    if program.rpartition("/")[2] == "specrouter":
        assert main(words) == 0
        return
    assert program.rpartition("/")[2] in ("python", "python3"), f"{program}: see NOT_RUN"
    assert words[0] == "-m"
    monkeypatch.setattr(sys, "argv", words[1:])
    with exits_well():
        runpy.run_module(words[1], run_name="__main__")


@contextmanager
def exits_well() -> Iterator[None]:
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"it ended with {end.code}") from end


def ask(router: ChainRouter, words: list[str]) -> None:
    """What `curl` would send. The answer is no error."""
    url, body, headers = "", None, []
    arguments = iter(words)
    for word in arguments:
        if word == "-H":
            name, _, value = next(arguments).partition(": ")
            headers.append((name, value))
        elif word in ("-d", "--data"):
            body = next(arguments).encode()
        elif word.startswith("http://127.0.0.1:8000/"):
            url = word.removeprefix("http://127.0.0.1:8000")
        else:
            assert word in ("-s", "-N"), word
    response = request(router, "GET" if body is None else "POST", url, body, headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("snippet", [one for one in snippets() if one.is_complete], ids=str)
@pytest.mark.usefixtures("folder")
def test_complete_python_of_the_documents_runs(snippet: Snippet) -> None:
    if "openai" in snippet.text:
        pytest.importorskip("openai")
        pytest.skip("needs a service to talk to")
    text = snippet.text.replace('"smollm2"', '"tiny-3m"')  # which is not fetched
    exec(compile(text, str(snippet), "exec"), {"__name__": "__main__"})
