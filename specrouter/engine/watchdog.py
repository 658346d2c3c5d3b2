"""Watchdog: looks now and then whether the engine's thread hangs, in a drafter's forward or not.

A drafter that hangs is given up. From a cycle that does not end nothing can be saved.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from specrouter.engine.engine import Engine

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # how often, at least


@dataclass(frozen=True)
class Watchdog:
    """Attributes:
    engine: the one that runs now.
    step_timeout_s: that a cycle may take.
    ended: there is nothing to look after any more.
    replace: has another thread go on, without the model that hangs.
    leave_behind: ends everything, for this reason, while the engine's thread is stuck.
    """

    engine: Callable[[], Engine]
    step_timeout_s: float
    ended: threading.Event
    replace: Callable[[str], None]
    leave_behind: Callable[[str], None]

    def watch(self) -> None:
        """Until `ended`."""
        limit_s = self.step_timeout_s
        while not self.ended.wait(min(_LOOK_S, self.engine().guard.limit_s / 4, limit_s / 4)):
            try:
                self._look()
            except Exception:  # nobody else would notice a hang from now on
                logger.exception("the watchdog could not look")

    def _look(self) -> None:
        hung = self.engine().guard.give_up()
        if hung is not None:
            logger.warning("a forward of %s hangs; going on without it", hung)
            self.replace(hung)
        elif self.engine().step_s > self.step_timeout_s:
            self.leave_behind(f"a cycle has taken more than {self.step_timeout_s:g} s")
