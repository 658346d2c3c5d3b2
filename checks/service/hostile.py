"""Hostile requests: wrong and extreme values of every field, broken JSON, and structure bombs.

Contract: made by a seed alone; nothing is sent here. What would be served asks for few tokens.
"""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from checks.service.fuzz_answer import SERVED, Sent

_JSON = (("content-type", "application/json"),)
_FIELDS = (
    "prompt", "messages", "input_ids", "tokens", "model", "max_tokens", "max_new_tokens",
    "temperature", "top_k", "top_p", "min_p", "seed", "n", "best_of", "stop", "stop_token_ids",
    "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs", "bad_words", "bad_words_ids",
    "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "priority",
    "timeout_s", "slo", "speculation", "stream", "stream_options", "tools", "tool_choice",
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "chat_template", "chat_template_kwargs", "documents", "echo", "suffix", "user", "prediction",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308,
    5e-324, float("nan"), float("inf"), "", "a", "\x00", "\ud800", "\u202e", "a" * 70_000, [], [[]],
    [None], [-1], [2**31], ["a"] * 3000, list(range(5000)), {}, {"": ""}, {"a": {"b": {"c": []}}},
    {"5": 1}, {"5": float("nan")}, [{"role": "user", "content": None}],
    [{"role": "x", "content": "a"}], "{{ 7 * 7 }}",
    [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
    "{% for i in range(10**9) %}{% endfor %}", {"type": "json_schema"}, {"chain": ["a"]},
    {"tpot_ms": -1}, "../../etc/passwd",
)  # fmt: skip
_WRONG: tuple[bytes, ...] = (
    b"", b"{", b"[" * 100_000, b'{"prompt": ' * 50_000, b"\xff\xfe", b"\x00", b"null", b"[]", b"7",
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "\xed\xa0\x80"}', b'"a"',
    b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"\\udc00\\ud800": 1}',
    b'{"prompt": "a"}}', b'{"prompt": "a", "prompt": 7}', b" " * 100_000 + b"{}",
)  # fmt: skip


def requests(count: int, structures: int, seed: int) -> list[Sent]:
    """So many, so many of them with structures, in any order."""
    generator = random.Random(seed)
    plain = [hostile_request(generator) for _ in range(count - structures)]
    bombs = [_bomb(source, generator) for source in itertools.islice(_sources(seed), structures)]
    together = [*plain, *bombs]
    generator.shuffle(together)
    return together


def hostile_request(generator: random.Random) -> Sent:
    """Any but those with structures."""
    path = generator.choice(list(SERVED))
    if generator.random() < 0.1:
        return Sent("POST", path, _JSON, generator.choice(_WRONG))
    body = dict(SERVED[path])
    for name in generator.sample(_FIELDS, generator.choice((1, 1, 1, 2, 3))):
        body[name] = generator.choice(_VALUES)
    return _sent(path, body)


def _bomb(form: tuple[str, Any], generator: random.Random) -> Sent:
    kind, source = form
    path = generator.choice(("/v1/completions", "/v1/chat/completions", "/generate"))
    body = {**SERVED[path], "stream": generator.random() < 0.3}
    body["max_new_tokens" if path == "/generate" else "max_tokens"] = 24
    body["temperature"] = generator.choice((0, 1))
    return _sent(path, {**body, "structured_outputs": {kind: source}})


def _sources(seed: int) -> Iterator[tuple[str, Any]]:
    """Structures of every size, without end."""
    generator = random.Random(seed + 1)
    for number in itertools.count():
        size = generator.choice((3, 20, 80, 300, 1000, 3000))
        yield _BOMBS[number % len(_BOMBS)](size)


def _properties(size: int, name: str = "p") -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"{name}{i}": {"type": "integer"} for i in range(size)},
    }


def _rules(size: int) -> str:
    rules = "\n".join(f'r{i}: "a{i}" r{(i + 1) % size}?' for i in range(size))
    return f"start: {' | '.join(f'r{i}' for i in range(size))}\n{rules}"


def _chained(size: int) -> str:
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(size))
    return f'start: r0\n{rules}\nr{size}: "a"'


def _nested(size: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(min(size, 400)):
        schema = {"type": "array", "items": schema}
    return schema


_BOMBS = (
    lambda size: ("json", {"enum": [{"a": i} for i in range(size)]}),
    lambda size: ("json", {"enum": [f"value {i}" for i in range(size)]}),
    lambda size: ("json", _properties(size)),
    lambda size: ("json", {"anyOf": [_properties(6, f"p{i}_") for i in range(size)]}),
    lambda size: ("json", {"allOf": [_properties(4, f"p{i}_") for i in range(size % 90)]}),
    lambda size: ("json", {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}),
    lambda size: ("json", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    lambda size: ("json", {"$ref": f"http://127.0.0.1:9/{size}"}),
    lambda size: ("json", {"$ref": "file:///etc/passwd"}),
    lambda size: ("json", _nested(size)),
    lambda size: ("json", {"type": "string", "pattern": f"(a|b|ab){{0,{size}}}c"}),
    lambda size: ("json", {"type": "string", "minLength": size, "maxLength": 1}),
    lambda size: ("json", {"type": "number", "multipleOf": 10**-9, "minimum": size}),
    lambda size: ("json", {"not": {"type": "string"}}),
    lambda size: ("regex", f"(a{{{size}}}){{{size}}}"),
    lambda size: ("regex", f"(a+)+{{{size}}}b"),
    lambda size: ("regex", "(" * size + "a" + ")" * size),
    lambda size: ("regex", f"[^a]{{{size}}}\\p{{L}}*"),
    lambda size: ("regex", "|".join(f"{i}x*" for i in range(size))),
    lambda size: ("regex", "(?=a)b\\1"),
    lambda size: ("choice", [f"choice {i}" for i in range(size)]),
    lambda size: ("choice", ["a" * size]),
    lambda size: ("grammar", _rules(size)),
    lambda size: ("grammar", _chained(size)),
    lambda size: ("grammar", 'start: e\ne: e e e | "a" | e "b" e'),
    lambda size: ("grammar", 'start: "ab" rest\nrest: rest "c"'),
    lambda size: ("grammar", f'start: /[ab]{{{size}}}/ rest\nrest: rest "c"'),
    lambda size: ("grammar", f"start: {'a ' * size}\na: /x*/ /x*/"),
    lambda size: ("grammar", "%import common.WORD\nstart: WORD"),
    lambda size: ("grammar", "start: " + "(" * size),
)  # fmt: skip


def _sent(path: str, body: Any) -> Sent:
    return Sent("POST", path, _JSON, json.dumps(body).encode())
