"""Contenders: recorded texts, `transformers`, and a server elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import research.policies  # noqa: F401 (registers the published ones)
from modelpool import ModelPool
from modelpool.config import PoolConfig
from modelpool.errors import ConfigError
from modelpool.fast.cpu import int8_refusal
from research.bench import reference
from research.bench.lineup import lineup
from research.bench.peer import OPENAI_VARIABLE, PeerContender
from research.bench.recorded import RecordedContender, RecordedPrompt
from research.bench.reference import Checkpoint
from specrouter.bench.prompts import BenchPrompt, Work
from tests.json_server import JsonHandler, serving
from tests.specrouter.bench.test_contenders import CountingRouter

WORK = Work((BenchPrompt("x", "ab", (5, 6)), BenchPrompt("x", "c", (7,))), (3, 4), 8, 1.0)


# recorded texts


def test_own_contender_says_what_is_recorded_up_to_the_work_s_tokens() -> None:
    router: Any = CountingRouter()
    router.pool = SimpleNamespace(vocab_size=40)
    short, long = tuple(range(3)), (9,) * 40
    prompts = (RecordedPrompt("x", "a", (5,), short), RecordedPrompt("x", "b", (6,), long))
    RecordedContender("off", router).run(Work(prompts, (1, 2), 8, 0.0))
    params = router.calls[-1][1]
    assert [one.max_new_tokens for one in params] == [3, 8]
    forms = [one.structure for one in params]
    assert [form.token_ids for form in forms] == [(0, 1, 2), (9,) * 8]


# transformers


@pytest.fixture
def checkpoints(small_family: dict[str, Path]) -> list[Checkpoint]:
    return [Checkpoint(str(path), "float32", "cpu") for path in small_family.values()]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reference_ignores_what_a_checkpoint_would_add_to_sampling(
    temperature: float, checkpoints: list[Checkpoint], tmp_path: Path
) -> None:
    plain = Path(checkpoints[-1].path)
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    own = {"eos_token_id": 0, "repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "min_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    work = Work(WORK.prompts, WORK.seeds, 12, temperature)
    found = reference._generate(Checkpoint(str(tmp_path), "float32", "cpu"), None, work)
    assert found.token_ids == reference._generate(checkpoints[-1], None, work).token_ids
    assert [len(ids) for ids in found.token_ids] == [12, 12]
    assert found.target_passes == 12
    assert found.seconds > 0


def test_padding_does_not_change_a_greedy_output(checkpoints: list[Checkpoint]) -> None:
    target = checkpoints[-1]
    both = reference._generate(target, None, Work(WORK.prompts, (0, 0), 6, 0.0))
    alone = reference._generate(target, None, Work(WORK.prompts[1:], (0,), 6, 0.0))
    assert both.token_ids[1] == alone.token_ids[0]


def test_assistant_leaves_a_greedy_output_as_it_is(checkpoints: list[Checkpoint]) -> None:
    work = Work(WORK.prompts[:1], (0,), 12, 0.0)
    alone = reference._generate(checkpoints[-1], None, work)
    assisted = reference._generate(checkpoints[-1], checkpoints[-2], work)
    assert assisted.token_ids == alone.token_ids
    assert assisted.target_passes < alone.target_passes


# a peer


class Server(JsonHandler):
    seen: ClassVar[list[dict[str, Any]]]
    authorized: ClassVar[list[str | None]]
    completion: ClassVar[dict[str, Any]]

    def do_GET(self) -> None:
        self.authorized.append(self.headers["Authorization"])
        self.answer({"data": [{"id": "its-model"}]})

    def do_POST(self) -> None:
        self.authorized.append(self.headers["Authorization"])
        self.seen.append(self.body())
        self.answer(self.completion)


@pytest.fixture
def url() -> Iterator[str]:
    Server.seen, Server.authorized = [], []
    Server.completion = {"choices": [{"text": "aaaaaaaa"}], "usage": {"completion_tokens": 7}}
    with serving(Server) as url:
        yield url


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_peer_is_asked_with_the_whole_batch(suffix: str, url: str) -> None:
    peer = PeerContender(url + suffix, lambda text: [1] * len(text))
    Server.seen.clear()
    sample = peer.run(WORK)
    assert sorted(Server.seen, key=lambda body: body["seed"]) == [
        {"model": "its-model", "prompt": text, "max_tokens": 8, "temperature": 1.0, "seed": seed,
         "ignore_eos": True}
        for text, seed in (("ab", 3), ("c", 4))
    ]  # fmt: skip
    assert sample.tokens == 14
    assert sample.distinct == pytest.approx((0.2, 0.2))


@pytest.mark.parametrize(("usage", "tokens"), [({"completion_tokens": 0}, 0), ({}, 16), (None, 16)])
def test_a_peer_that_made_nothing_is_not_believed_to_have_made_all(
    usage: dict[str, int] | None, tokens: int, url: str
) -> None:
    Server.completion = {"choices": [{"text": ""}], "usage": usage}
    assert PeerContender(url).run(WORK).tokens == tokens


@pytest.mark.parametrize(("key", "header"), [("a-key", "Bearer a-key"), ("", None), (None, None)])
def test_peer_is_sent_the_key_that_is_given_or_the_environment_s(
    key: str | None, header: str | None, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OPENAI_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(OPENAI_VARIABLE, key)
    PeerContender(url).run(WORK)
    assert Server.authorized == [header] * 4  # the models, a first request, two texts
    Server.authorized.clear()
    PeerContender(url, api_key="given").run(WORK)
    assert Server.authorized == ["Bearer given"] * 4


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "127.0.0.1:9", "ftp://x"])
def test_unreachable_peer_is_refused_at_the_start(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^--peer: "):
        PeerContender(address)


def test_peer_that_answers_something_else_is_refused(url: str) -> None:
    Server.completion = {"error": "no such model"}
    with pytest.raises(ConfigError, match=r"--peer: no completions .*no such model"):
        PeerContender(url)


# who takes part


@pytest.fixture(scope="module")
def tiny() -> ModelPool:
    names = ("tiny-1m", "tiny-1m-code", "tiny-3m", "tiny-8m")
    models = [{"name": name, "source": f"bundled:{name}"} for name in names]
    models.append({"name": "text", "source": "ngram"})
    return ModelPool(PoolConfig.model_validate({"target": "tiny-8m", "models": models}))


def test_all_take_part_unless_some_are_asked_for(tiny: ModelPool) -> None:
    who = lineup(tiny, None, has_peer=False)
    assert who.has_transformers
    assert who.assistants == ("tiny-1m", "tiny-1m-code", "tiny-3m")
    assert ("tiny-1m", "tiny-3m", "tiny-8m") in who.chains
    assert all(chain[-1] == "tiny-8m" and len(chain) > 1 for chain in who.chains)
    assert who.policies == ("adaptive",)
    who = lineup(tiny, ["assisted:tiny-3m", "tiny-1m>tiny-8m", "adaptive"], has_peer=False)
    assert (who.has_transformers, who.assistants) == (False, ("tiny-3m",))
    assert who.chains == (("tiny-1m", "tiny-8m"),)
    assert (who.pairs, who.smallest, who.policies) == ((), None, ("adaptive",))
    who = lineup(tiny, ["tuned", "smallest"], has_peer=False)
    assert (who.chains, len(who.pairs), who.smallest) == ((), 4, ("tiny-1m", "tiny-8m"))


@pytest.mark.skipif(int8_refusal() is not None, reason=str(int8_refusal()))
def test_a_twin_stands_in_chains_and_assists_nobody() -> None:
    models = [{"name": name, "source": f"bundled:{name}"} for name in ("tiny-1m", "tiny-8m")]
    models.append({"name": "twin", "source": "quantised:tiny-8m"})
    pool = ModelPool(PoolConfig.model_validate({"target": "tiny-8m", "models": models}))
    who = lineup(pool, None, has_peer=False)
    assert ("twin", "tiny-8m") in who.chains
    assert ("tiny-1m", "twin", "tiny-8m") in who.chains
    assert who.assistants == ("tiny-1m",)


@pytest.mark.parametrize(
    "own", [("tests.specrouter.own_policies:FIRST",), ("paper", "specustream")]
)
def test_policies_of_ones_own_take_part_where_they_are_named(
    own: tuple[str, ...], tiny: ModelPool
) -> None:
    who = lineup(tiny, ["adaptive", *reversed(own)], has_peer=False)
    assert who.policies == ("adaptive", *own)
    assert lineup(tiny, own, has_peer=False).policies == own


@pytest.mark.parametrize("name", ["none.such:POLICY", "tests.specrouter.own_policies:SECOND"])
def test_a_policy_that_cannot_be_imported_is_refused_with_the_reason(
    name: str, tiny: ModelPool
) -> None:
    with pytest.raises(ConfigError, match=rf"^--only: '{name}' is none of .*Error: "):
        lineup(tiny, ["off", name], has_peer=False)


def test_unknown_contender_is_refused(tiny: ModelPool) -> None:
    for name in ("tiny-2m", "assisted:text", "tiny-8m", "peer", ""):
        with pytest.raises(ConfigError, match=r"^--only: "):
            lineup(tiny, ["off", name], has_peer=False)


def test_static_chains_of_a_pool_without_drafters_are_refused() -> None:
    models = [{"name": "tiny-1m", "source": "bundled:tiny-1m"}]
    alone = ModelPool(PoolConfig.model_validate({"target": "tiny-1m", "models": models}))
    with pytest.raises(ConfigError, match=r"^--only: 'static' is none of off, .*no chain"):
        lineup(alone, ["static"], has_peer=False)
