"""LoadProgress: what is being done before a pool's models can be used, for others to ask.

Contract: one thread tells, any may look.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Literal

logger = logging.getLogger(__name__)

# "reading": configuration and tokenizer; "timing": forward passes of several sizes.
LoadStage = Literal["starting", "reading", "downloading", "inflating", "loading", "timing"]


@dataclass(frozen=True)
class LoadStep:
    """`model`: its name in the pool; None where it is about none. `since_s`: of `monotonic`.
    `done_bytes`, `total_bytes`: of a download; None where they are not known."""

    stage: LoadStage
    model: str | None
    since_s: float
    done_bytes: int | None = None
    total_bytes: int | None = None

    def __str__(self) -> str:
        doing = self.stage if self.model is None else f"{self.stage} {self.model}"
        if self.done_bytes is None or self.total_bytes is None:
            return doing
        return f"{doing}, {self.done_bytes / 1e9:.2f} of {self.total_bytes / 1e9:.2f} GB"


class LoadProgress:
    """`is_drawn`: on the terminal, where no library's bar should be beside it."""

    is_drawn = False

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._step = LoadStep("starting", None, self._started_s)

    def begin(self, stage: LoadStage, model: str) -> None:
        self._step = LoadStep(stage, model, time.monotonic())
        is_long = stage in ("downloading", "inflating")  # the others are told when they are done
        logger.log(logging.INFO if is_long else logging.DEBUG, "%s %s", stage, model)

    def count(self, done_bytes: int, total_bytes: int) -> None:
        """Of the download that has begun, what is here."""
        self._step = replace(self._step, done_bytes=done_bytes, total_bytes=total_bytes)

    @property
    def step(self) -> LoadStep:
        return self._step

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started_s
