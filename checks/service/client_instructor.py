"""Instructor against the service, in its default mode and others.

Runs in an environment that has `instructor`.
"""

from typing import Any

import instructor
from openai import OpenAI

from checks.service.report import Report, run_client
from checks.service.tool_schemas import MODEL, QUESTION, Person

_ASKED: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0,
    "max_tokens": 200,
}  # fmt: skip


def main(report: Report, url: str, key: str) -> None:
    inner = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    with report.check("default mode"):
        check_person(instructor.from_openai(inner))
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        with report.check(mode.name):
            check_person(instructor.from_openai(inner, mode=mode))
    with report.check("a stream of parts"):
        check_partial(instructor.from_openai(inner))


def check_person(client: Any) -> None:
    for seed in range(3):
        person = client.chat.completions.create(response_model=Person, seed=seed, **_ASKED)
        assert isinstance(person, Person)


def check_partial(client: Any) -> None:
    parts = list(client.chat.completions.create_partial(response_model=Person, **_ASKED))
    assert len(parts) > 1
    Person.model_validate(parts[-1].model_dump())


if __name__ == "__main__":
    run_client("instructor", main)
