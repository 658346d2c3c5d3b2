"""What log lines look like."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

from specrouter.logs import REQUEST_ID, JsonFormatter, TextFormatter, add_request_id


def record_of(message: str, *arguments: object, **extra: Any) -> logging.LogRecord:
    record = logging.getLogger("some.name").makeRecord(
        "some.name", logging.WARNING, __file__, 1, message, arguments, None, extra=extra
    )
    record.created = 1_800_000_000.25
    add_request_id(record)
    return record


def as_json(record: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(record)
    assert "\n" not in line
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def test_json_line_has_all_that_was_said() -> None:
    assert as_json(record_of("two\nlines of %s", "é", rows=3)) == {
        "time": "2027-01-15T08:00:00.250Z",
        "level": "WARNING",
        "logger": "some.name",
        "message": "two\nlines of é",
        "request_id": None,
        "rows": 3,
    }


def test_json_line_has_the_traceback() -> None:
    record = record_of("failed")
    try:
        raise ValueError("lost")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert as_json(record)["exception"].endswith("ValueError: lost")


def test_extra_that_json_does_not_know_is_written_as_text() -> None:
    assert as_json(record_of("m", error=ValueError("lost")))["error"] == "lost"


def test_text_line_has_the_time_and_the_request() -> None:
    record = record_of("served %d", 3, request_id="mine", rows=3)
    assert TextFormatter().format(record) == (
        "2027-01-15T08:00:00.250Z WARNING some.name: served 3 [mine]"
    )
    assert TextFormatter().format(record_of("m")).endswith(" m")


def test_line_carries_the_id_of_the_request_in_whose_task_it_is_written() -> None:
    token = REQUEST_ID.set("mine")
    try:
        assert as_json(record_of("m"))["request_id"] == "mine"
        assert as_json(record_of("m", request_id="another"))["request_id"] == "another"
    finally:
        REQUEST_ID.reset(token)


def test_warnings_of_libraries_are_json_too() -> None:
    script = (
        "import logging, warnings\n"
        "from transformers.utils import logging as transformers_logging\n"
        "from specrouter.logs import configure_logs\n"
        "configure_logs(logging.INFO, 'json')\n"
        "warnings.warn('old')\n"
        "transformers_logging.get_logger('transformers.models').warning('slow')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["logger"] for line in lines] == ["py.warnings", "transformers.models"]
