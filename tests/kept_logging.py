"""Logging as it was before a test: the command line configures it, in this process where it is run.

Contract: what is kept is of the loggers that there are at the beginning. A library that is first
imported meanwhile keeps what it does with its own.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_logging() -> Iterator[None]:
    known = logging.root.manager.loggerDict.values()  # and placeholders of their parents
    loggers = [logging.root, *(one for one in known if isinstance(one, logging.Logger))]
    before = [(one, one.level, one.propagate, one.disabled, [*one.handlers]) for one in loggers]
    off = logging.root.manager.disable
    try:
        yield
    finally:
        logging.disable(off)
        logging.captureWarnings(False)
        for logger, level, propagate, is_disabled, handlers in before:
            if logger.level != level:
                logger.setLevel(level)  # which forgets for whom records are made
            logger.propagate, logger.disabled, logger.handlers[:] = propagate, is_disabled, handlers
