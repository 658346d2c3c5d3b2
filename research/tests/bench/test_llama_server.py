"""llama.cpp's server as a contender, against a small server that answers as it does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from modelpool.checkpoint.bundled import bundled_root
from modelpool.checkpoint.tokenizers import load_tokenizer
from modelpool.errors import ConfigError
from research.__main__ import main
from research.bench.llama_server import Answer, LlamaServerContender, read_answer, sample
from specrouter.bench.contenders import MeasurementError
from specrouter.bench.prompts import BenchPrompt, Work
from specrouter.cli.arguments import default_config
from specrouter.http_client import events
from tests.json_server import JsonHandler, serving

PROMPTS = (BenchPrompt("x", "ab", (97, 98)), BenchPrompt("x", "c", (99,)))
WORK = Work(PROMPTS, (3, 2**32 + 4), 8, 0.7)


class Server(JsonHandler):
    """Says 9, two tokens an event, as a server that drafts does. `text`: of ids."""

    requests: ClassVar[list[tuple[str, Any, str | None]]]
    facts: ClassVar[dict[str, Any]]
    last: ClassVar[dict[str, Any]]
    failing: ClassVar[str]
    text: ClassVar[Callable[[list[int]], str]]

    def do_GET(self) -> None:
        self.answer(self.facts)

    def do_POST(self) -> None:
        body = self.body()
        self.requests.append((self.path, body, self.headers["Authorization"]))
        if self.path == "/detokenize":
            self.answer({"content": Server.text(body["tokens"])})
        else:
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        tokens = int(body["n_predict"])
        sent = [{"content": "x", "tokens": [9, 9], "stop": False} for _ in range(tokens // 2)]
        end = {
            "stop": True,
            "tokens_predicted": tokens,
            "tokens_evaluated": len(body["prompt"]),
            "timings": {"draft_n": tokens, "draft_n_accepted": tokens // 2},
        }
        lines = [json.dumps(one) for one in (*sent, {**end, **self.last})]
        data = "".join(f": ping\n\ndata: {line}\n\n" for line in lines)
        self.send((self.failing or data).encode())


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    Server.requests, Server.last, Server.failing = [], {}, ""
    Server.facts = {"total_slots": 4, "default_generation_settings": {"n_ctx": 1024}}
    Server.text = lambda ids: "".join(map(chr, ids))
    with serving(Server) as url:
        yield url


def test_each_request_asks_for_the_engine_s_work(url: str) -> None:
    LlamaServerContender(f"{url}/", "secret").run(WORK)
    assert {key for *_, key in Server.requests} == {"Bearer secret"}
    asked = {tuple(body["prompt"]): body for path, body, _ in Server.requests}
    assert {path for path, *_ in Server.requests} == {"/completion"}
    assert asked == {
        ids: {
            "prompt": list(ids),
            "n_predict": 8,
            "temperature": 0.7,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": False,
            "samplers": ["temperature"],
            "repeat_penalty": 1.0,
        }
        for ids, seed in (((97, 98), 3), ((99,), 4))
    }


def test_figures_are_of_the_tokens_that_came(url: str) -> None:
    found = LlamaServerContender(url).run(WORK)
    assert (found.tokens, found.requests) == (16, 2)
    assert found.distinct == (0.2, 0.2)  # one 4-gram in five
    assert found.acceptance_length == pytest.approx(2.0)
    assert found.tpot_ms is not None
    assert 0 < found.tpot_ms < 1000 * found.seconds


def answer(tokens: int, last_s: float, accepted: int | None) -> Answer:
    """To a prompt of one token, from 10 s on."""
    times = {"first_s": 10.0, "last_s": last_s}
    ids = (1,) * tokens
    return Answer(token_ids=ids, tokens=tokens, prompt_tokens=1, accepted=accepted, **times)


def test_time_per_token_is_from_the_first_to_the_last() -> None:
    answers = [answer(3, 10.5, None), answer(5, 11.0, 3)]
    assert [one.tpot_ms for one in answers] == [250.0, 250.0]
    assert answers[0].acceptance_length is None
    assert answers[1].acceptance_length == 2.5
    found = sample(answers, 2.0)
    assert (found.tokens, found.seconds, found.tpot_ms) == (8, 2.0, 250.0)
    assert found.acceptance_length is None  # not known of all
    assert answer(1, 10.0, None).tpot_ms is None


@pytest.mark.parametrize(
    ("last", "failing", "complaint"),
    [
        ({"tokens_predicted": 7}, "", "7 tokens came, not 8"),
        ({"truncated": True}, "", "the text was truncated"),
        ({"stop": False}, "", "the stream broke off"),
        ({}, 'data: {"error": {"code": 400, "message": "no"}}\n\n', "'message': 'no'"),
        ({}, 'error: {"message": "too long"}\n\n', "too long"),
        ({}, "data: {nonsense\n\n", "JSONDecodeError"),
    ],
)
def test_a_request_that_is_not_the_same_work_fails_the_measurement(
    url: str, last: dict[str, Any], failing: str, complaint: str
) -> None:
    contender = LlamaServerContender(url)
    Server.last, Server.failing = last, failing
    with pytest.raises(MeasurementError, match=complaint):
        contender.run(WORK)


def test_a_stream_has_events_comments_and_an_end() -> None:
    lines = [b": ping\n", b"\n", b'data: {"a": 1}\n', b"data: [DONE]\n"]
    assert list(events(iter(lines))) == [{"a": 1}]
    found = read_answer(iter([{"content": "x", "tokens": [4]}, {"stop": True}]))
    assert (found.token_ids, found.tokens) == ((4,), 1)
    assert (found.prompt_tokens, found.accepted) == (None, None)


def test_a_server_that_can_do_the_work_passes_the_check(url: str) -> None:
    contender = LlamaServerContender(url)
    contender.check(PROMPTS, (1, 4), 1022)
    assert contender.supports(4)
    assert not contender.supports(5)


@pytest.mark.parametrize(
    ("batches", "new_tokens", "last", "complaint"),
    [
        ((1, 8), 8, {}, "has 4 slots for batches of 8: start it with --parallel 8"),
        ((1,), 1023, {}, "has 1024 tokens for requests of 1025: .* --ctx-size"),
        ((1,), 8, {"tokens_evaluated": 3}, "reads 3 tokens of a prompt of 2"),
        ((1,), 8, {"tokens_predicted": 0}, "failed a first request: .* 0 tokens came, not 1"),
    ],
)
def test_a_server_that_cannot_do_the_work_is_refused(
    url: str, batches: tuple[int, ...], new_tokens: int, last: dict[str, Any], complaint: str
) -> None:
    contender = LlamaServerContender(url)
    Server.last = last
    with pytest.raises(ConfigError, match=rf"^--peer: llama-server {complaint}"):
        contender.check(PROMPTS, batches, new_tokens)


def test_a_server_of_another_tokenizer_is_refused(url: str) -> None:
    other = BenchPrompt("x", "other text", (97, 98))
    with pytest.raises(ConfigError, match=r"^--peer: .* is it the pool's target"):
        LlamaServerContender(url).check([other], (1,), 8)


@pytest.mark.parametrize("facts", [{}, {"total_slots": 1}, {"total_slots": None}])
def test_what_is_no_llama_server_is_refused(url: str, facts: dict[str, Any]) -> None:
    Server.facts = facts
    with pytest.raises(ConfigError, match=r"^--peer: no llama-server at http"):
        LlamaServerContender(url)


def test_it_takes_turns_with_the_engine(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(bundled_root() / "tiny-8m", field="x")
    Server.text = lambda ids: str(tokenizer.decode(ids))
    options = ["--rounds=2", "--new-tokens=4", "--batch=1", "--only", "off", "--json=-"]
    config = ["--config", str(default_config()), "--peer", f"llama-server={url}"]
    assert main(["chains", *config, *options]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out.splitlines()[-1])["batches"]["1"]["contenders"]
    assert list(rows) == ["llama-server", "off"]
    assert rows["off"]["over"]["llama-server"]["median"] > 0
    assert rows["llama-server"]["acceptance_length"] == pytest.approx(2.0)
    rounds = [line for line in err.splitlines() if ", round" in line and "tokens/s" in line]
    assert [line.count("llama-server") for line in rounds] == [1, 1]
