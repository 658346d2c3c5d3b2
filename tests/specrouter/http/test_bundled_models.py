"""The endpoints with real models: what they say is what the router makes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from modelpool.checkpoint.bundled import bundled_root
from specrouter import ChainRouter, SamplingParams
from specrouter.request.receipt import Receipt
from tests.specrouter.http.client import answer_of, post, stream_of

PROMPT = "def fib(n):\n    "
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "héllo wörld"}]


@pytest.fixture(scope="module")
def router() -> Iterator[ChainRouter]:
    models = [
        {"name": name, "source": f"bundled:{name}", "dtype": "float32"}
        for name in ("tiny-1m", "tiny-3m")
    ]
    settings = {
        "pool": {"target": "tiny-3m", "models": models},
        "engine": {"max_requests": 4, "max_model_len": 128},
    }
    with ChainRouter.from_config(settings) as router:
        yield router


def ask(router: ChainRouter, path: str, **fields: Any) -> dict[str, Any]:
    return answer_of(router, path, fields)


def sha256_of(name: str) -> str:
    file = bundled_root() / name / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_completion_is_the_routers_text_streamed_or_not(router: ChainRouter) -> None:
    expected = router.generate(PROMPT, SamplingParams(max_new_tokens=12, ignore_eos=True))[0].text
    whole = ask(router, COMPLETIONS, **GREEDY)
    assert whole["choices"][0]["text"] == expected
    chunks = stream_of(router, {**GREEDY, "n": 2}, COMPLETIONS)
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks]
        assert "".join(one["text"] for one in own if one["index"] == index) == expected
    plain = ask(router, COMPLETIONS, **GREEDY, speculation="off")
    assert plain["choices"][0]["text"] == expected
    assert not any(plain["usage"]["completion_tokens_details"].values())


@pytest.mark.parametrize("path", ["/generate", COMPLETIONS, CHAT])
def test_a_receipt_is_the_same_with_drafts_and_without(router: ChainRouter, path: str) -> None:
    said: dict[str, Any] = {"prompt": PROMPT} if path != CHAT else {"messages": MESSAGES}
    length = "max_new_tokens" if path == "/generate" else "max_tokens"
    body = {**said, length: 12, "temperature": 0.8, "seed": 3, "receipt": True}

    def receipt_in(answer: dict[str, Any]) -> Any:
        return answer.get("choices", [answer])[0]["receipt"]

    alone = receipt_in(ask(router, path, **body, speculation="off"))
    drafted = {"chain": ["tiny-1m", "tiny-3m"], "depth": 3}
    assert receipt_in(ask(router, path, **body, speculation=drafted)) == alone
    assert receipt_in(stream_of(router, body, path)[-1]) == alone
    receipt = Receipt.read(json.dumps(alone))
    assert (receipt.seed, len(receipt.token_ids)) == (3, 12)
    assert receipt.served.files["model.safetensors"] == sha256_of("tiny-3m")
    assert receipt.sampling().temperature == 0.8


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.exact)])
def test_acceptance_of_all_requests_adds_up_to_what_the_engine_has_counted(
    router: ChainRouter, count: int
) -> None:
    before = router.instruments.decoded()
    told: Counter[str] = Counter()
    for number in range(count):
        chain = {"chain": ["tiny-1m", "tiny-3m"], "depth": 1 + number % 4, "width": 1 + number % 3}
        body = {**GREEDY, "temperature": number % 2, "seed": number, "speculation": chain}
        if number % 4 == 3:
            body["stream_options"] = {"include_usage": True}
            answer = stream_of(router, body, COMPLETIONS)[-1]
        else:
            answer = ask(router, COMPLETIONS, **body)
        figures = answer["metrics"]["speculative_decoding"]
        steps, histogram = figures["num_spec_steps"], figures["acceptance_histogram"]
        accepted = figures["num_accepted_draft_tokens"]
        assert len(histogram) == figures["num_spec_tokens"] + 1
        assert sum(histogram) == steps
        assert sum(taken * times for taken, times in enumerate(histogram)) == accepted
        assert figures["mean_acceptance_length"] == 1 + accepted / steps
        assert figures["draft_acceptance_rate"] == accepted / figures["num_draft_tokens"]
        assert figures["chains"].keys() == {"tiny-1m>tiny-3m"}
        told.update({name: figures[name] for name in figures if name.startswith("num_")})
    after = router.instruments.decoded()
    for name, counted in (
        ("num_spec_steps", "drafts"),
        ("num_draft_tokens", "drafted_tokens"),
        ("num_accepted_draft_tokens", "accepted_tokens"),
    ):
        assert told[name] == getattr(after, counted) - getattr(before, counted)


def test_a_stream_tells_who_proposed_its_tokens_where_asked(router: ChainRouter) -> None:
    speculation = {"chain": ["tiny-1m", "tiny-3m"], "depth": 3, "width": 2}
    body = {"prompt": PROMPT, "max_new_tokens": 24, "speculation": speculation}
    ask(router, "/generate", **body)  # both models have read the prompt then
    whole = ask(router, "/generate", **body, return_drafts=True)
    events = stream_of(router, {**body, "return_drafts": True}, "/generate")
    drafts = [event["draft"] for event in events]
    assert drafts == whole["drafts"]
    for event in events:
        assert len(event["draft"]["proposed_by"]) == len(event["token_ids"])
        assert "".join(event["draft"]["texts"]) == event["text"]
        tree = event["draft"]["tree"]
        assert {len(each) for name, each in tree.items() if name != "accepted"} == {
            len(tree["parents"])
        }
    assert {name for one in drafts for name in one["proposed_by"]} == {"tiny-1m", "tiny-3m"}
    assert "draft" not in stream_of(router, body, "/generate")[0]
    assert "drafts" not in ask(router, "/generate", **body)


def test_an_echoed_text_has_the_logprobs_that_it_was_made_with(router: ChainRouter) -> None:
    made = ask(router, COMPLETIONS, **GREEDY, logprobs=1, return_token_ids=True)["choices"][0]
    ids = made["prompt_token_ids"] + made["token_ids"]
    read = ask(router, COMPLETIONS, prompt=ids, echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert read["text"] == PROMPT + made["text"]
    found = read["logprobs"]
    assert found["token_logprobs"][0] is None
    own = found["token_logprobs"][-12:]
    assert own == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-3)
    # What evaluations ask: is each token the likeliest?
    assert [max(top.values()) for top in found["top_logprobs"][-12:]] == pytest.approx(own)
    for offset, text in zip(found["text_offset"], found["tokens"], strict=True):
        assert read["text"][offset:].startswith(text.rstrip("\ufffd"))


def test_what_stopped_a_text_is_told_and_kept_where_asked(router: ChainRouter) -> None:
    [whole] = ask(router, COMPLETIONS, **GREEDY, return_token_ids=True)["choices"]
    stop, id_ = whole["text"][3:5], whole["token_ids"][2]
    before = whole["text"].partition(stop)[0]
    for keep in (False, True):
        fields = {"stop": [stop], "include_stop_str_in_output": keep}
        [choice] = ask(router, COMPLETIONS, **GREEDY, **fields)["choices"]
        assert choice["text"] == (before + stop if keep else before)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    [choice] = ask(router, COMPLETIONS, **GREEDY, stop_token_ids=[id_])["choices"]
    assert choice["stop_reason"] == id_


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [2], [999_999]]}, "prompt[2]"),
        (COMPLETIONS, {**GREEDY, "guided_regex": "("}, "guided_regex"),
        (CHAT, {"messages": MESSAGES, "guided_json": {"type": 3}}, "guided_json"),
        ("/generate", {"prompt": "a", "guided_grammar": "start"}, "guided_grammar"),
    ],
)
def test_what_the_models_cannot_serve_is_a_400_that_names_the_clients_field(
    router: ChainRouter, path: str, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = post(router, {"max_new_tokens": 8, **fields, "stream": stream}, path)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {**GREEDY, "max_tokens": 200}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a " * 500}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "a " * 500]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": ["a", "b" * 2000]}, "prompt[1]"),
        (CHAT, {"messages": [{"role": "user", "content": "a " * 500}]}, "messages"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 200}, "max_completion_tokens"),
        ("/generate", {"prompt": "a", "max_new_tokens": 200}, "max_new_tokens"),
    ],
)
def test_too_many_tokens_have_openais_code_and_words(
    router: ChainRouter, path: str, fields: dict[str, Any], param: str
) -> None:
    response = post(router, fields, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == param
    words = "This model's maximum context length is 128 tokens. However, "
    assert error["message"].startswith(f"{param}: {words}")
