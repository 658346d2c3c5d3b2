"""The command line on a fake router: what it prints, and its exit codes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelpool import ModelPool
from modelpool.errors import ConfigError
from specrouter import SLO, ChainRouter, SamplingParams, Speculation
from specrouter.cli.main import main
from specrouter.config import RouterConfig
from specrouter.request.output import FinishReason
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.http.client import serve

Install = Callable[[FakeRouter], FakeRouter]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes every configuration give this router."""

    def give(router: FakeRouter) -> FakeRouter:
        monkeypatch.setattr(ChainRouter, "from_config", lambda *_, **__: router)
        return router

    return give


CONFIG = """
pool:
  target: big
  models: [{name: small, source: "bundled:tiny-1m"}, {name: big, source: "bundled:tiny-8m"}]
slo_classes: {interactive: {tpot_ms: 50, ttft_ms: 1000}, coding: {tpot_ratio: 1.2}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """With the fake router's models and classes."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return file


def one_line(error: str) -> str:
    """stderr, which must be one line and no traceback."""
    assert error.endswith("\n")
    assert error.count("\n") == 1
    return error


# generate


def test_generate_prints_the_text_and_one_line_of_figures(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    router = install(FakeRouter())
    assert main(["generate", "def f"]) == 0
    out, err = capsys.readouterr()
    assert out == " ab\nc é\n"
    assert one_line(err) == (
        "4 tokens (length) | 80.0 tokens/s | ttft 20 ms | acceptance length 1.50 | "
        "small>big 75%, big 25% | seed 7\n"
    )
    assert router.calls == [("def f", SamplingParams(), None)]
    assert router.is_closed


SAMPLING = ["--max-new-tokens=3", "--temperature=0.5", "--top-k=40", "--top-p=0.9", "--seed=11"]
SAMPLED = SamplingParams(
    max_new_tokens=3, temperature=0.5, top_k=40, top_p=0.9, seed=11, stop=("x", "y")
)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ([], (SamplingParams(), None, None)),
        ([*SAMPLING, "--stop=x", "--stop=y"], (SAMPLED, None, None)),
        (["--no-speculation"], (SamplingParams(), "off", None)),
        (
            ["--chain", "small, big", "--depth", "3", "--width", "2"],
            (SamplingParams(), Speculation(("small", "big"), 3, 2), None),
        ),
        (
            ["--slo-tpot-ms=40", "--slo-ttft-ms=900", "--slo-e2e-ms", "5000"],
            (SamplingParams(), None, SLO(tpot_ms=40, ttft_ms=900, e2e_ms=5000)),
        ),
        (["--slo-class", "coding"], (SamplingParams(), None, "coding")),
    ],
)
def test_generate_hands_every_option_on(
    options: list[str], asked: tuple[Any, ...], install: Install, config: Path
) -> None:
    router = install(FakeRouter())
    assert main(["generate", "p", "--config", str(config), *options]) == 0
    [(_, params, speculation)] = router.calls
    assert (params, speculation, *router.slos) == asked


@pytest.mark.parametrize(
    ("command", "argv", "sources"),
    [
        ("generate", "tiny-8m p", ["bundled:tiny-8m", "ngram"]),
        ("generate", "tiny-8m p --draft tiny-1m ngram --set engine.max_requests=3",
         ["bundled:tiny-8m", "bundled:tiny-1m", "ngram"]),
        ("generate", "tiny-8m --seed 1 p", ["bundled:tiny-8m", "ngram"]),
        ("generate", "--draft tiny-1m -- tiny-8m p",
         ["bundled:tiny-8m", "bundled:tiny-1m", "ngram"]),
        ("generate", "tiny-8m --config tiny-ngram", ["ngram", "bundled:tiny-1m"]),
        ("generate", "p --seed 1 --config tiny-ngram", ["ngram", "bundled:tiny-1m"]),
        ("bench turns", "tiny-8m --draft tiny-1m",
         ["bundled:tiny-8m", "bundled:tiny-1m", "ngram"]),
        ("bench load", "tiny-8m --poisson 1", ["bundled:tiny-8m", "ngram"]),
        ("bench chains", "tiny-8m", ["bundled:tiny-8m", "ngram"]),
    ],
)  # fmt: skip
def test_what_is_loaded_may_be_named_as_for_serve(
    command: str, argv: str, sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class LoadedError(Exception):
        pass

    def load(config: RouterConfig, *_: object) -> None:
        assert [one.source for one in config.pool.models][: len(sources)] == sources
        assert config.engine.max_requests == 3 or "--set" not in argv
        raise LoadedError

    monkeypatch.setattr(ChainRouter, "from_config", load)
    with pytest.raises(LoadedError):
        main([*command.split(), *argv.split()])


@pytest.mark.parametrize(
    "name", ["nope", "tiny-1m>nope>tiny-8m", "tiny-8m>tiny-1m", "tiny-8m>tiny-8m"]
)
def test_a_chain_or_policy_that_cannot_be_is_refused_before_the_pool_is_opened(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ModelPool, "from_config", None)
    argv = ["bench", "chains", "tiny-8m", "--draft", "tiny-1m", "--only", "adaptive", name]
    assert main(argv) == 2
    assert f"--only: {name!r}" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("ends", ["length", "engine_dead"])
def test_failed_generation_ends_with_the_cause_and_code_1(
    ends: FinishReason, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(FakeRouter(error="out of memory", ends=ends))
    assert main(["generate", "p"]) == 1
    assert "out of memory" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--chain", "tiny,big"], "--chain"),
        (["--no-speculation", "--depth", "3"], "--depth"),
        (["--width", "9"], "speculation.width"),
        (["--slo-tpot-ms", "nan"], "--slo-tpot-ms"),
        (["--slo-class", "urgent"], "--slo-class"),
        (["--slo-class", "interactive", "--slo-tpot-ms", "40"], "--slo-tpot-ms"),
    ],
)
def test_bad_value_is_one_line_that_names_the_field(
    options: list[str],
    field: str,
    install: Install,
    config: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    router = install(FakeRouter())
    assert main(["generate", "p", "--config", str(config), *options]) == 2
    assert field in one_line(capsys.readouterr().err)
    assert router.calls == []


@pytest.mark.parametrize(
    "target", ["tiny", "tiny-8m", "configs", "no/where.gguf", "org/name-GGUF:Q4_K_M"]
)
def test_a_target_alone_is_no_prompt(
    target: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    router = install(FakeRouter())
    assert main(["generate", target]) == 2
    assert f"PROMPT: is missing: {target!r} is a TARGET" in one_line(capsys.readouterr().err)
    assert main(["generate", "and/or"]) == 0
    assert [prompt for prompt, *_ in router.calls] == ["and/or"]


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], "COMMAND"),
        (["generate"], "PROMPT"),
        (["generate", "--draft", "auto", "tiny-8m", "p"], "it stands behind TARGET and PROMPT"),
        (["generate", "tiny-8m", "--seed", "1", "p", "q"], "q"),
        (["generate", "tiny-8m", "p", "--seed", "1", "q"], "q"),
        (["generate", "p", "--top-k", "x"], "--top-k"),
        (["generate", "p", "--tempratur", "1"], "--tempratur"),
        (["generate", "p", "--no-speculation", "--chain", "a,b"], "--chain"),
        (["serve", "--port", "x"], "--port"),
        (["inflate", "somewhere"], "OUT_DIR"),
        (["bench"], "WHAT"),
        (["check", "a.yaml", "--config", "b.yaml"], "--config"),
        (["check", "--config", "b.yaml", "a.yaml"], "--config"),
    ],
)
def test_bad_argument_is_one_line_that_names_it(
    argv: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert name in one_line(capsys.readouterr().err)


def test_bad_config_is_one_line_that_names_the_field(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("pool.models[1].source", "no such directory")

    monkeypatch.setattr(ChainRouter, "from_config", refuse)
    assert main(["generate", "p"]) == 2
    expected = "specrouter: pool.models[1].source: no such directory\n"
    assert one_line(capsys.readouterr().err) == expected


# serve


def visited(visit: Callable[[str], Any], ending: signal.Signals) -> Any:
    """`specrouter serve` in this process, which the visitor then ends."""
    results = list[Any]()

    def act(url: str) -> None:
        try:
            results.append(visit(url))
        finally:
            os.kill(os.getpid(), ending)

    assert serve(act) == 0
    return results[0]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_serve_says_where_answers_and_stops_cleanly(
    ending: signal.Signals, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    router = install(FakeRouter())
    seen: list[str] = []

    def visit(url: str) -> str:
        seen.append(url)
        text: str = httpx.post(f"{url}/generate", json={"prompt": "def f"}).json()["text"]
        return text

    assert visited(visit, ending) == " ab\nc é"
    out = capsys.readouterr().out
    assert out.startswith(f"SpecRouter serves big at {seen[0]} ")
    assert f"curl {seen[0]}/generate" in out
    assert out.endswith("SpecRouter has stopped\n")
    assert router.is_closed


def test_serve_on_a_port_in_use_says_so(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    router = install(FakeRouter())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}" in one_line(capsys.readouterr().err)
    assert not router.calls


@pytest.mark.parametrize(
    ("options", "key", "warned"),
    [
        (["--host=0.0.0.0"], None, "server.host: 0.0.0.0 is open to the network, and there are no"),
        (["--host=0.0.0.0"], "key", None),
        ([], None, None),
    ],
)
def test_serve_warns_of_an_address_that_anyone_can_reach(
    options: list[str],
    key: str | None,
    warned: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("specrouter.http.serve.serve", lambda _: None)
    monkeypatch.delenv("SPECROUTER_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("SPECROUTER_API_KEY", key)
    assert main(["serve", *options]) == 0
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [one.startswith(warned or "") for one in warnings] == ([True] if warned else [])
