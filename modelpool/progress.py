"""LoadProgress: what is being done before a pool's models can be used, for others to ask.

Contract: one thread tells, any may look.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)

# "reading": configuration and tokenizer; "timing": forward passes of several sizes.
LoadStage = Literal["starting", "reading", "downloading", "inflating", "loading", "timing"]


@dataclass(frozen=True)
class LoadStep:
    """`model`: its name in the pool; None where it is about none. `since_s`: of `monotonic`."""

    stage: LoadStage
    model: str | None
    since_s: float


class LoadProgress:
    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._step = LoadStep("starting", None, self._started_s)

    def begin(self, stage: LoadStage, model: str) -> None:
        self._step = LoadStep(stage, model, time.monotonic())
        is_long = stage in ("downloading", "inflating")  # the others are told when they are done
        logger.log(logging.INFO if is_long else logging.DEBUG, "%s %s", stage, model)

    @property
    def step(self) -> LoadStep:
        return self._step

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started_s
