"""A test finds its log records, whatever another one has left."""

import logging

import pytest

from specrouter.logs import configure_logs
from tests.kept_logging import kept_logging

logger = logging.getLogger("specrouter.made_up")


def test_what_a_test_changes_of_logging_is_undone(caplog: pytest.LogCaptureFixture) -> None:
    parent, handlers = logging.getLogger("specrouter"), [*logging.root.handlers]
    with kept_logging():
        logging.root.handlers.clear()
        configure_logs(logging.CRITICAL, "json")
        parent.propagate, parent.disabled = False, True
        parent.addHandler(logging.NullHandler())
        logger.setLevel(logging.ERROR)
        logging.disable(logging.CRITICAL)
        logger.warning("while all is off")
    logger.warning("afterwards")
    assert caplog.messages == ["afterwards"]
    assert logging.root.handlers == handlers
    assert (parent.handlers, parent.disabled) == ([], False)


def test_it_is_undone_after_a_failure_or_a_skip(caplog: pytest.LogCaptureFixture) -> None:
    @kept_logging()
    def skipped() -> None:
        logging.disable(logging.CRITICAL)
        pytest.skip("starts a process")

    with pytest.raises(pytest.skip.Exception):
        skipped()
    logger.warning("afterwards")
    assert caplog.messages == ["afterwards"]
