"""`specrouter bench load`: its requests, a server, the bundled pool, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from modelpool.errors import ConfigError
from specrouter.bench.contenders import MeasurementError
from specrouter.bench.load import load_requests
from specrouter.bench.services import ServerService
from specrouter.cli.arguments import default_config
from specrouter.cli.main import _parser, main
from specrouter.http_client import API_KEY_VARIABLE
from tests.json_server import JsonHandler, serving
from tests.load_requests import load_request

TINY = str(default_config())


def bench_server(url: str, *options: str) -> int:
    return main(["bench", "load", f"--server={url}", *options])


def letters(text: str) -> list[int]:
    return list(text.encode())


def test_requests_come_at_the_rate_with_their_objectives_and_are_the_same_again() -> None:
    asked = "bench load --poisson=4 --requests=400 --tpot-ms=9 --e2e-ms=800"
    options = _parser().parse_args(asked.split())
    texts = {"code": ["abcdef"], "prose": ["xy"]}
    found = load_requests(options, texts, letters, limit=68)
    assert found[-1].at_s == pytest.approx(100.0, rel=0.15)
    assert {(one.category, one.token_ids) for one in found} == {
        ("code", tuple(b"cdef")),  # cut from the left
        ("prose", tuple(b"xy")),
    }
    assert {(one.objective_ms, one.ttft_ms, one.e2e_ms) for one in found} == {(9.0, None, 800.0)}
    assert len({one.seed for one in found}) == 400
    assert load_requests(options, texts, letters, limit=68) == found


def test_on_the_bundled_pool_both_ways_get_the_same_requests(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["--poisson=50", "--requests=3", "--output-tokens=4", "--rounds=2", "--ttft-ms=60000"]
    file = tmp_path / "load.json"
    assert main(["bench", "load", "--config", TINY, *asked, f"--json={file}"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(file.read_text())
    assert err.splitlines()[-1] == f"wrote {file}"
    assert found["conditions"]["poisson_per_s"] == 50
    for row in found["ways"].values():
        assert (row["requests"], row["errors"], row["attainment"]) == (3, 0, 1.0)
        assert row["tokens_per_s"] * row["duration_s"] == pytest.approx(12, rel=0.3)
    assert found["ways"]["off"]["acceptance_length"] == 1.0
    lines = [line.split()[:3] for line in out.splitlines()]
    assert ["speculation", "on", "100%"] in lines


# A server


class Answers(JsonHandler):
    """Six tokens in two events; refuses an odd seed. Reads letters, and at most 40 of them."""

    seen: ClassVar[list[tuple[dict[str, Any], str | None]]]
    authorized: ClassVar[list[str | None]]
    read: ClassVar[list[str]]
    e2e: ClassVar[list[str | None]]

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer({"status": "ok"})
        else:
            self.authorized.append(self.headers["Authorization"])
            self.answer({"data": [{"id": "theirs", "max_model_len": 40}]})

    def do_POST(self) -> None:
        body = self.body()
        self.authorized.append(self.headers["Authorization"])
        if self.path == "/tokenize":
            self.read.append(body["prompt"])
            self.answer({"tokens": letters(body["prompt"])})
            return
        self.seen.append((body, self.headers["x-slo-tpot-ms"]))
        self.e2e.append(self.headers["x-slo-e2e-ms"])
        if body["seed"] % 2:
            self.answer({"error": {"message": "seed: is odd"}}, 400)
            return
        last = {
            "token_ids": [1] * 5,
            "finish_reason": "length",
            "metrics": {"acceptance_length": 2.5},
        }
        events = [json.dumps({"token_ids": [1]}), json.dumps(last), "[DONE]"]
        self.send("".join(f"data: {one}\n\n" for one in events).encode())


@pytest.fixture
def server() -> Iterator[str]:
    Answers.seen, Answers.authorized, Answers.read, Answers.e2e = [], [], [], []
    with serving(Answers) as url:
        yield url


def test_server_is_asked_with_headers_and_judged_by_the_clients_clock(server: str) -> None:
    service = ServerService(server)
    asked = load_request(token_ids=(5, 6), new_tokens=6, seed=2, objective_ms=12.5, tenant="ours")
    pending = service.send(asked)
    answer = pending.answer()
    assert pending.is_done
    assert (answer.error, answer.tokens, answer.acceptance_length) == (None, 6, 2.5)
    assert answer.ttft_ms is not None
    assert answer.ttft_ms > 0
    assert answer.tpot_ms is not None
    body, header = Answers.seen[0]
    assert header == "12.5"
    assert body["input_ids"] == [5, 6]
    assert (body["prefix_cache"], body["cache_salt"]) == (False, "ours")
    assert (body["stream"], body["ignore_eos"], body["max_new_tokens"]) == (True, True, 6)
    answer = service.send(
        load_request(token_ids=(5, 6), new_tokens=6, seed=3, e2e_ms=5000.0)
    ).answer()
    assert answer.error is not None
    assert "seed: is odd" in answer.error
    assert Answers.seen[1][1] is None
    assert Answers.e2e == [None, "5000"]
    assert set(Answers.authorized) == {None}


KEY = "the-key"


def test_key_goes_to_the_server_and_nowhere_else(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    file = tmp_path / "load.json"
    options = ["--poisson=100", "--requests=2", "--output-tokens=6", "--input-tokens=3"]
    # The second request has an odd seed, and is refused: that is reported, with its cause.
    assert bench_server(server, *options, f"--json={file}") == 0
    assert set(Answers.authorized) == {f"Bearer {KEY}"}
    out, err = capsys.readouterr()
    assert "seed: is odd" in err
    assert KEY not in out + err + file.read_text()


def test_prompts_for_a_server_are_in_its_own_ids_and_within_its_limit(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opens(*_: object, **__: object) -> None:
        raise AssertionError("no model is needed here")

    monkeypatch.setattr("specrouter.bench.load.ModelPool", opens)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}')
    options = ["--poisson=100", "--requests=2", f"--prompts={prompts}"]
    assert bench_server(server, *options, "--output-tokens=6", "--input-tokens=7", "--json=-") == 0
    assert Answers.read == ["abc"]  # once
    assert {bytes(body["input_ids"]) for body, _ in Answers.seen} == {b"abcabca"}
    ways = [body["speculation"] for body, _ in Answers.seen]
    assert ways == [None] * 2 + ["off"] * 4 + [None] * 2  # both ways warm up
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["conditions"]["target"], found["conditions"]["config"]) == ("theirs", None)
    assert [row["errors"] for row in found["ways"].values()] == [1, 1]
    assert bench_server(server, *options, "--output-tokens=40") == 2
    assert "--output-tokens: does not fit the model's 40" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [{}, {"data": []}, {"data": [{"id": "x"}]}, []])
def test_a_server_that_does_not_say_what_it_serves_is_refused(
    answer: Any, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "do_GET", lambda self: self.answer(answer))
    with pytest.raises(ConfigError, match=r"--server: .* does not say what it serves"):
        ServerService(server)


def test_a_server_that_does_not_tokenize_fails_the_measurement(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = ServerService(server)
    monkeypatch.setattr(Answers, "do_POST", lambda self: self.answer({}))
    with pytest.raises(MeasurementError, match="does not tokenize"):
        service.tokenize("abc")


def test_a_key_that_cannot_be_sent_is_refused_without_telling_it(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "its secret")
    assert bench_server(server, "--poisson", "1") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"specrouter: {API_KEY_VARIABLE}: must be printable")
    assert "secret" not in error
