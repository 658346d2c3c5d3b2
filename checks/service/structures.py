"""Structured output over HTTP, with every chain: `python -m checks.service.structures`.

At least 200 requests with JSON schemas at temperature 1, each with a chain of its own, against the
same requests without speculation. In float32, every answer is valid, and its tokens and
log-probabilities are those without speculation. Prints a table; the exit code is 0 if all passed.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema

from checks.service.load import new_client
from checks.service.report import Report
from checks.service.service import DRAFTERS, TARGET, running, tiny_pool, wait_until_idle

_LARGEST_DIFFERENCE = 1e-4
_TOGETHER = 8
_MOST_TOKENS = 400
Schema = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.structures", description=__doc__)
    parser.add_argument("--requests", type=int, default=208)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = Report("structures")
    with running(tiny_pool("float32")) as service:
        asyncio.run(check(service.url, arguments.requests, arguments.seed, report))
        with report.check("all rows are free"):
            wait_until_idle(service.url)
    return report.show()


async def check(url: str, count: int, seed: int, report: Report) -> None:
    generator = random.Random(seed)
    schemas = [random_schema(generator) for _ in range(count)]
    bodies = [_body(schema, index) for index, schema in enumerate(schemas)]
    chains = list(itertools.islice(itertools.cycle(every_chain()), count))
    async with new_client(url) as client:
        plain = await _answers(client, [{**body, "speculation": "off"} for body in bodies])
        drafted = await _answers(
            client,
            [
                {**body, "speculation": None if chain is None else {"chain": chain}}
                for body, chain in zip(bodies, chains, strict=True)
            ],
        )
    with report.check("every answer ends by itself and is valid") as finding:
        finding.text = f"{2 * count} answers, {len(every_chain())} chains"
        for answer, schema in zip([*plain, *drafted], [*schemas, *schemas], strict=True):
            assert answer.finish_reason == "stop", f"{answer.finish_reason}: {answer.text[:200]}"
            jsonschema.validate(json.loads(answer.text), schema)
    with report.check("tokens are those without speculation") as finding:
        different = [i for i in range(count) if plain[i].token_ids != drafted[i].token_ids]
        finding.text = f"{sum(len(answer.token_ids) for answer in drafted)} tokens"
        assert not different, f"{len(different)}, the first with {chains[different[0]]}"
    with report.check("log-probabilities are those without speculation") as finding:
        worst = max(
            abs(a - b)
            for one, other in zip(plain, drafted, strict=True)
            for a, b in zip(one.logprobs, other.logprobs, strict=True)
        )
        finding.text = f"largest difference {worst:.1e}"
        assert worst <= _LARGEST_DIFFERENCE, finding.text


def every_chain() -> list[list[str] | None]:
    """The scheduler's own choice, and each set of drafters in the order of their strength."""
    chosen = [
        [*drafters, TARGET]
        for size in range(1, len(DRAFTERS) + 1)
        for drafters in itertools.combinations(DRAFTERS, size)
    ]
    return [None, *chosen]


def random_schema(generator: random.Random) -> Schema:
    """An object whose texts are all of bounded length."""
    names = generator.sample(("name", "count", "colour", "tags", "where", "done", "price"), 3)
    properties = {name: _random_value(generator, depth=1) for name in names}
    return _object(properties, names if generator.random() < 0.7 else names[:2])


def _object(properties: Schema, required: list[str]) -> Schema:
    named = {"properties": properties, "required": required}
    return {"type": "object", **named, "additionalProperties": False}


def _random_value(generator: random.Random, depth: int) -> Schema:
    kinds = ["enum", "integer", "string", "boolean", "pattern", "union"]
    kind = generator.choice([*kinds, "array", "object"] if depth else kinds)
    if kind == "enum":
        return {"enum": generator.sample(("red", "green", "blue", "café", "a b", "7"), 3)}
    if kind == "integer":
        return {"type": "integer", "minimum": generator.randint(-9, 9), "maximum": 99}
    if kind == "string":
        return {"type": "string", "maxLength": generator.randint(1, 12)}
    if kind == "pattern":
        return {"type": "string", "pattern": generator.choice(("^[a-z]{2,6}$", "^[0-9]{4}$"))}
    if kind == "union":
        return {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}]}
    if kind == "array":
        items = _random_value(generator, depth - 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}
    if kind == "object":
        inner = {name: _random_value(generator, depth - 1) for name in ("x", "y")}
        return _object(inner, ["x", "y"])
    return {"type": "boolean"}


def _body(schema: Schema, index: int) -> dict[str, Any]:
    """Each of the ways to ask for a schema in its turn."""
    asked: dict[str, Any] = {
        "prompt": "A thing, as JSON: ",
        "max_tokens": _MOST_TOKENS,
        "temperature": 1,
        "seed": index,
        "logprobs": 0,
        "return_token_ids": True,
    }
    wrapped = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    ways: tuple[dict[str, Any], ...] = (
        {"response_format": wrapped},
        {"guided_json": schema},
        {"structured_outputs": {"json": schema}},
    )
    return {**asked, **ways[index % len(ways)]}


async def _answers(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[Answer]:
    """In order. Raises `HTTPStatusError` where one is refused."""
    rows, began_s = asyncio.Semaphore(_TOGETHER), time.monotonic()
    answered = itertools.count(1)

    async def one(body: dict[str, Any]) -> Answer:
        async with rows:
            answer = await client.post("/v1/completions", json=body)
        choice = answer.raise_for_status().json()["choices"][0]
        if (done := next(answered)) % 50 == 0:
            took_s = time.monotonic() - began_s
            print(f"  {done} of {len(bodies)}, {took_s:.0f} s", flush=True)
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        return Answer(choice["text"], choice["finish_reason"], tuple(tokens), tuple(logprobs))

    return list(await asyncio.gather(*(one(body) for body in bodies)))


if __name__ == "__main__":
    sys.exit(main())
