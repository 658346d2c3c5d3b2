"""Instructor against the service, in its default mode and others.

    python -m checks.service.client_instructor URL KEY OUT

Runs in an environment that has `instructor`.
"""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import instructor
from openai import OpenAI

from checks.service.report import Report
from checks.service.tool_schemas import MODEL, QUESTION, Person

_ASKED: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0,
    "max_tokens": 200,
}  # fmt: skip


def main(url: str, key: str, saved: Path) -> int:
    report = Report(f"instructor {version('instructor')}")
    inner = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    with report.check("default mode"):
        check_person(instructor.from_openai(inner))
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        with report.check(mode.name):
            check_person(instructor.from_openai(inner, mode=mode))
    with report.check("a stream of parts"):
        check_partial(instructor.from_openai(inner))
    report.save(saved)
    return 0 if report.passed else 1


def check_person(client: Any) -> None:
    for seed in range(3):
        person = client.chat.completions.create(response_model=Person, seed=seed, **_ASKED)
        assert isinstance(person, Person)


def check_partial(client: Any) -> None:
    parts = list(client.chat.completions.create_partial(response_model=Person, **_ASKED))
    assert len(parts) > 1
    Person.model_validate(parts[-1].model_dump())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
