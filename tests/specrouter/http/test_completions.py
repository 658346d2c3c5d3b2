"""`POST /v1/completions` before a fake router: what clients of OpenAI and vLLM send and read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from specrouter import Delta, SamplingParams, Structure, TokenLogprobs
from specrouter.http.request_log import RequestLog
from tests.specrouter.fake_router import (
    METRICS,
    TOKEN_TEXTS,
    FakeRouter,
    FakeTokenizer,
    router_without_models,
)
from tests.specrouter.http.client import (
    UNASKED,
    answer_of,
    app_of,
    cases,
    post,
    refusal,
    send,
    stream_of,
)
from tests.specrouter.request.test_detokenizer import byte_fallback, id_of

PATH = "/v1/completions"
PROMPT: dict[str, Any] = {"prompt": "ab"}
IDS = FakeTokenizer()("ab")["input_ids"]
TEXT = " ab\nc é"
OBJECT = {"type": "json_object"}
WRITTEN_FREELY = {"whitespace_pattern": None, "disable_any_whitespace": False}
JSON_OF_A = Structure("json_schema", '{"a": 1}')
A = Structure("regex", "a")
NAMED = {"schema": {"a": 1}, "name": "n", "description": "d", "strict": False}
WRAPPED = {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}


def complete(router: FakeRouter | None = None, **fields: Any) -> dict[str, Any]:
    return answer_of(router or FakeRouter(), PATH, {**PROMPT, **fields})


def choices(**fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = complete(**fields)["choices"]
    return found


def streamed(router: FakeRouter | None = None, **fields: Any) -> list[dict[str, Any]]:
    return stream_of(router or FakeRouter(), {**PROMPT, **fields}, PATH)


def asked(**fields: Any) -> SamplingParams:
    """What reaches the router."""
    router = FakeRouter()
    complete(router, **fields)
    params: SamplingParams = router.calls[0][1]
    return params


# Answers


def test_an_answer_has_openais_envelope_one_choice_and_the_usage() -> None:
    answer = complete()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1.7e9
    assert answer.pop("system_fingerprint").startswith("fp_")
    choice = {"index": 0, "text": TEXT, "logprobs": None}
    assert answer == {
        "object": "text_completion",
        "model": "big",
        "choices": [{**choice, "finish_reason": "length", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {
                "accepted_prediction_tokens": 2,
                "rejected_prediction_tokens": 3,
                "reasoning_tokens": 0,
            },
        },
        "metrics": {"speculative_decoding": METRICS.speculative_decoding, "sampling": {}},
    }


def test_the_defaults_are_openais() -> None:
    assert asked() == SamplingParams(max_new_tokens=16, temperature=1.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 3}, {"max_new_tokens": 3}),
        ({"max_completion_tokens": 4, "max_tokens": 3}, {"max_new_tokens": 4}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"n": 2, "logprobs": 20, "seed": 4}, {"n": 2, "logprobs": 20, "seed": 4}),
        ({"seed": -2}, {"seed": 2**64 - 2}),
        ({"temperature": 1e-6}, {"temperature": 1e-6}),
        ({"stop": None, "logit_bias": {"5": -100}}, {"logit_bias": ((5, -100.0),)}),
        ({"min_p": 0.5}, {"min_p": 0.5}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"echo": True, "logprobs": 2}, {"logprobs": 2, "prompt_logprobs": 2}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}),
        ({"best_of": 3}, {"n": 3, "logprobs": 0}),
        ({"suffix": "", "user": "me", "colour": [1]}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"allowed_token_ids": None, "truncate_prompt_tokens": False}, {}),
        ({"guided_whitespace_pattern": None, "logits_processors": False}, {}),
    ],
)
def test_fields_reach_the_router(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    defaults = {"max_new_tokens": 16, "temperature": 1.0}
    assert asked(**fields) == SamplingParams(**{**defaults, **expected})


@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        ({"response_format": {"type": "json_object"}}, Structure("json_object")),
        ({"response_format": WRAPPED}, Structure("json_schema", '{"a": 1}')),
        ({"response_format": {**OBJECT, "schema": {"a": 1}}}, Structure("json_schema", '{"a": 1}')),
        ({"response_format": {**OBJECT, "schema": {}}}, Structure("json_object")),
        ({"guided_json": {"a": "д"}}, Structure("json_schema", '{"a": "д"}')),
        ({"guided_json": '{"a":1}'}, Structure("json_schema", '{"a": 1}')),
        ({"guided_regex": "a+"}, Structure("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Structure("choice", '["a", "b"]')),
        ({"guided_grammar": "start: A"}, Structure("grammar", "start: A")),
        ({"structured_outputs": {"regex": "a+"}}, Structure("regex", "a+")),
        ({"structured_outputs": {"json": {"a": 1}}}, Structure("json_schema", '{"a": 1}')),
        ({"structured_outputs": {"json_object": True}}, Structure("json_object")),
        ({"structured_outputs": {"json": {"a": 1}, **WRITTEN_FREELY}}, JSON_OF_A),
        # As vLLM's Python makes it, and as OpenAI's clients do.
        ({"structured_outputs": {"regex": "a", "_backend_was_auto": False, "_backend": None}}, A),
        ({"response_format": {**WRAPPED, "json_schema": NAMED}}, JSON_OF_A),
    ],
)
def test_a_form_is_asked_for_as_openai_or_vllm_does(
    fields: dict[str, Any], structure: Structure
) -> None:
    assert asked(**fields).structure == structure


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"prompt": "ab"}, [IDS]),
        ({"prompt": "ab", "add_special_tokens": False}, [IDS[1:]]),
        ({"prompt": ["ab", "b"]}, [IDS, FakeTokenizer()("b")["input_ids"]]),
        ({"prompt": [5, 6]}, [[5, 6]]),
        ({"prompt": [[5, 6], [7]]}, [[5, 6], [7]]),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_either(
    fields: dict[str, Any], ids: list[list[int]]
) -> None:
    router = FakeRouter()
    answer = complete(router, **fields)
    assert [call[0] for call in router.calls] == ids
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))


def test_choices_are_numbered_by_prompt_then_by_sample() -> None:
    answer = complete(prompt=["a", "b"], n=2, echo=True)
    assert [(c["index"], c["text"][0]) for c in answer["choices"]] == [
        (0, "a"), (1, "a"), (2, "b"), (3, "b")
    ]  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == 4  # a prompt counts once
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("ends", "stop_reason", "finish_reason"),
    [("eos", None, "stop"), ("stop", "x", "stop"), ("stop", 8, "stop"), ("length", None, "length")],
)
def test_endings_are_openais(ends: Any, stop_reason: Any, finish_reason: str) -> None:
    router = FakeRouter(ends=ends, stop_reason=stop_reason)
    [choice] = complete(router)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish_reason, stop_reason)
    *earlier, last = streamed(router)
    assert last["choices"][0]["finish_reason"] == finish_reason
    assert {chunk["choices"][0]["finish_reason"] for chunk in earlier} == {None}


class Uneven(FakeRouter):
    """The likeliest of its samples is the second, the least likely the first."""

    def _sample(self, params: Any, index: int, prompt: Any) -> list[Delta]:
        *deltas, last = super()._sample(params, index, prompt)
        assert last.output is not None
        logprobs = [TokenLogprobs(5, [-3.0, -1.0, -2.0][index])]
        output = replace(last.output, text=f"sample {index}", logprobs=logprobs)
        return [*deltas, replace(last, output=output)]


def test_best_of_returns_the_likeliest_by_mean_logprob() -> None:
    answer = complete(Uneven(), best_of=3, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["sample 1", "sample 2"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 12  # all that were made


def test_ids_are_returned_where_asked() -> None:
    [choice] = choices(return_token_ids=True)
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (IDS, [5, 6, 7, 8])


# Log-probabilities


def test_logprobs_are_lists_by_token_with_offsets_into_the_text() -> None:
    [choice] = choices(logprobs=1)
    assert choice["logprobs"] == {
        "tokens": [" a", "b", "\nc", " é"],
        "token_logprobs": [-1.25, -1.5, -1.75, -2.0],
        "top_logprobs": [
            {" a": -0.25},
            {" a": -0.25, "b": -1.5},
            {" a": -0.25, "\nc": -1.75},
            {" a": -0.25, " é": -2.0},
        ],
        "text_offset": [0, 2, 3, 5],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "offsets"),
    [
        ({}, " ab", [0, 2, 2]),
        ({"skip_special_tokens": False}, " a<s>b", [0, 2, 5]),
        ({"prompt": "ab", "echo": True}, "ab ab", [0, 0, 1, 2, 4, 4]),
        ({"prompt": [1, 6], "echo": True}, "<s>b ab", [0, 3, 4, 6, 6]),
    ],
)
def test_offsets_are_places_in_the_text_which_hides_special_tokens(
    fields: dict[str, Any], text: str, offsets: list[int], stream: bool
) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.added_tokens_decoder = {1: AddedToken("<s>", special=True)}
    shown = "<s>" if "skip_special_tokens" in fields else ""
    runs = ((" a", [5]), (shown, [tokenizer.begin]), ("b", [6]))
    router, body = FakeRouter(runs=runs, tokenizer=tokenizer), {"logprobs": 0, **fields}
    told = streamed(router, **body) if stream else [complete(router, **body)]
    parts = [one["choices"][0] for one in told]
    assert "".join(part["text"] for part in parts) == text
    assert [at for part in parts for at in part["logprobs"]["text_offset"]] == offsets


def test_logprobs_of_zero_have_the_tokens_own_alone() -> None:
    [choice] = choices(logprobs=0)
    top = choice["logprobs"]["top_logprobs"]
    assert [list(one) for one in top] == [[text] for text in TOKEN_TEXTS.values()]


def test_echo_puts_the_prompt_and_its_logprobs_first() -> None:
    [choice] = choices(prompt=[5, 6], echo=True, logprobs=1)
    assert choice["text"] == " ab" + TEXT
    found = choice["logprobs"]
    assert found["tokens"] == [" a", "b", *TOKEN_TEXTS.values()]
    assert found["token_logprobs"][:3] == [None, -0.006, -1.25]
    assert found["top_logprobs"][:2] == [None, {" a": -0.25, "b": -0.006}]
    assert found["text_offset"] == [0, 2, 3, 5, 6, 8]


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echoed_text_keeps_the_space_after_it(
    as_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tokenizer whose decoder drops the space before the first word of what it decodes."""
    tokenizer = byte_fallback()
    router, engine = router_without_models(tokenizer, monkeypatch)
    engine.first_token = id_of(tokenizer, "\u2581Paris")
    prompt = tokenizer("France is")["input_ids"] if as_ids else "France is"
    with router:
        body = {"prompt": prompt, "echo": True, "max_tokens": 1}
        [choice] = post(router, body, PATH).json()["choices"]
    assert choice["text"] == "France is Paris"


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_and_echo_read_the_prompt_only(stream: bool) -> None:
    router = FakeRouter()
    fields = {"prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 0}
    found = streamed(router, **fields) if stream else [complete(router, **fields)]
    [[choice]] = [chunk["choices"] for chunk in found]
    assert (choice["text"], choice["finish_reason"]) == (" ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.006]
    assert router.calls[0][1].max_new_tokens == 1
    assert stream or found[0]["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_are_by_id_as_vllm_has_them() -> None:
    [choice] = choices(prompt=[5, 6], prompt_logprobs=1)
    assert choice["prompt_logprobs"] == [
        None,
        {
            "6": {"logprob": -0.006, "rank": None, "decoded_token": "b"},
            "5": {"logprob": -0.25, "rank": 1, "decoded_token": " a"},
        },
    ]
    assert choice["logprobs"] is None


# Streams


def test_a_stream_is_a_chunk_per_run_with_the_same_envelope() -> None:
    chunks = streamed()
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [" a", "b\nc", " é"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 1},
        {"prompt": [5, 6], "echo": True, "logprobs": 1, "prompt_logprobs": 1},
        {"prompt": ["a", "b"], "n": 2, "echo": True, "return_token_ids": True},
    ],
)
def test_the_chunks_of_a_choice_add_up_to_the_whole(fields: dict[str, Any]) -> None:
    whole = choices(**fields)
    added: list[dict[str, Any]] = [{} for _ in whole]
    for chunk in streamed(**fields):
        [part] = chunk["choices"]
        joined = added[part.pop("index")]
        for name, value in part.items():
            if isinstance(value, dict):
                lists = joined.setdefault(name, {})
                for inner, more in value.items():
                    lists[inner] = lists.get(inner, []) + more
            elif isinstance(value, str | list) and name in joined and joined[name] is not None:
                joined[name] += value
            else:
                joined[name] = value
    assert [{"index": index, **joined} for index, joined in enumerate(added)] == whole


def test_usage_comes_in_a_last_chunk_without_choices() -> None:
    *chunks, last = streamed(stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == complete()["usage"]
    assert last["metrics"] == complete()["metrics"]
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    chunks = streamed(stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 3, 4]


@pytest.mark.parametrize("fields", [{"n": 2}, {"best_of": 2}, {"prompt": ["a", "b"]}])
def test_acceptance_is_of_a_single_text(fields: dict[str, Any]) -> None:
    assert "metrics" not in complete(**fields)


# Refusals


SCHEMA = "response_format.json_schema.schema"
BAD_VALUES: dict[str, Sequence[Any]] = {
    "prompt": ([], {}, "\ud800", ["a"] * 129),
    "max_tokens": (0, 10**400),
    "max_completion_tokens": (0,),
    "min_tokens": (17,),
    "logprobs": (21,),
    "top_p": (0,),
    "suffix": ("x",),
    "truncate_prompt_tokens": (0, -1),
    "response_format.type": ("xml",),
    "guided_json": ("[", "[]", {"a": float("nan")}),
    "guided_choice": ([],),
    "structured_outputs.regex": (3,),
    "structured_outputs": ({}, {"json_object": False, "regex": None, "structural_tag": None}),
    "structured_outputs.structural_tag": ("{}",),
    "structured_outputs.choices": (["a"],),
    "response_format.kind": ("json_object",),
    "response_format.json_schema.scheme": ({},),
    "speculation": ({"\ud800": 1},),
    "speculation.colour": (1,),
}  # fmt: skip
BAD: list[tuple[dict[str, Any], str]] = [
    *cases(BAD_VALUES),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [1, "2"]}, "prompt[1]"),
    ({"prompt": ["a", 2]}, "prompt[1]"),
    ({"prompt": [[1], [1, -2]]}, "prompt[1][1]"),
    ({"prompt": [10**30]}, "prompt[0]"),
    ({"prompt": ["a", "b"], "n": 65}, "n"),
    ({"prompt": ["a", "b"], "best_of": 128, "stream": False}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"use_beam_search": True, "n": 2}, "use_beam_search"),
    ({"guided_whitespace_pattern": "", "guided_regex": "a"}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_schema"}}, SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{"}}}, SCHEMA),
    ({"response_format": {**OBJECT, "schema": "["}}, "response_format.schema"),
    ({"response_format": {**WRAPPED, "schema": {}}}, "response_format.schema"),
    ({"response_format": {**WRAPPED, **OBJECT}}, "response_format.json_schema"),
    *(
        ({"structured_outputs": fields}, f"structured_outputs.{[*fields][1]}")
        for fields in (
            {"regex": "a", "whitespace_pattern": " "},
            {"choice": ["a"], "disable_any_whitespace": True},
            {"grammar": "start: A", "disable_additional_properties": True},
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            {"json": {"x-guidance": {}}, "whitespace_pattern": " "},
        )
    ),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    ({"stream_options": {"usage": True}, "stream": True}, "stream_options.usage"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_field_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    response = post(UNASKED, {**PROMPT, **fields}, PATH)
    assert (response.status_code, refusal(response)["param"]) == (400, param)
    assert UNASKED.calls == []


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("regex", "a+", "regex"),
        ("json_schema", {}, "json"),
        ("grammar", "root ::= 'a'", "grammar"),
        ("structural_tag", "{}", ""),
    ],
)
def test_other_servers_names_of_a_form_are_answered_with_ours(
    field: str, value: Any, instead: str
) -> None:
    error = refusal(post(UNASKED, {**PROMPT, field: value}, PATH))
    assert error["param"] == field
    assert f"structured_outputs.{instead}".rstrip(".") in error["message"]


def test_a_limit_on_new_tokens_is_named_as_the_client_named_it() -> None:
    message = refusal(post(FakeRouter(), {**PROMPT, "min_tokens": 17}, PATH))["message"]
    assert message == "min_tokens: must be at most max_tokens, which is 16"


def test_the_id_of_an_answer_is_that_of_its_request_or_its_own() -> None:
    headers = [("Content-Type", "application/json"), ("x-request-id", "mine")]
    app, content = RequestLog(app_of(FakeRouter())), json.dumps(PROMPT).encode()
    assert send(app, "POST", PATH, content, headers).json()["id"] == "cmpl-mine"
    first, second = complete(), complete()
    assert first["id"] != second["id"]
    assert first["system_fingerprint"] == second["system_fingerprint"]
