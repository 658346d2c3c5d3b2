"""Format of log lines: text, or JSON with one object per line.

Contract: a line that is logged while an HTTP request is served carries the request's id, from any
module that runs in the request's task. Only the command line calls `configure_logs`.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)

# Attributes that logging gives every record; all others were added by the caller.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {
    "asctime",
    "color_message",  # uvicorn's, for terminals
    "message",
    "request_id",
    "taskName",
}


def configure_logs(level: int, log_format: LogFormat = "text") -> None:
    """Log to stderr from `level` on; handlers of an embedding program stay."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(add_request_id)
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # we log the start ourselves
    for client in ("httpx", "httpx2"):  # they log a line for each request to the hub
        logging.getLogger(client).setLevel(logging.WARNING)
    if log_format == "json":  # as many lines of stderr as possible are JSON
        logging.captureWarnings(True)
        if "transformers" in sys.modules:
            adopt_transformers()


def adopt_transformers() -> None:
    """Send the log lines of transformers through our handlers.

    A function of its own, because importing transformers takes seconds.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


def add_request_id(record: logging.LogRecord) -> bool:
    """Add the request's id to a record unless it has one; a filter that passes all records."""
    if not hasattr(record, "request_id"):
        record.request_id = REQUEST_ID.get()
    return True


class TextFormatter(logging.Formatter):
    """Formatter for lines of text.

    Example: `2026-11-21T14:03:05.123Z INFO specrouter.engine.engine: message [request id]`.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        line = super().formatMessage(record)
        return line if request_id is None else f"{line} [{request_id}]"


class JsonFormatter(logging.Formatter):
    """Formatter for lines `{"time", "level", "logger", "message", "request_id", ...}`.

    Fields that the caller added with `extra` keep their names; `exception` holds a traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
        }
        for name, value in record.__dict__.items():
            if name not in _STANDARD:
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _time(record: logging.LogRecord) -> str:
    """Return the record's time in UTC, to the millisecond."""
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
