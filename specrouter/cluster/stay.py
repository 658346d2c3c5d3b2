"""Stay: an attempt at a replica, and what it is told there."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

Cause = Literal["error", "silence", "drain", "lost", "endangered"]


class Told:
    """The replica has told its state."""


class Moved(Exception):
    """A request has to go on at another replica."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(eq=False)
class Stay:
    """An attempt at a replica, since `began_s`.

    Attributes:
        inbox: of its messages, with a `Told` for each state that the replica tells by itself;
            `Moved` among them ends it.
        is_counted: in the replica's last state.
        came: when tokens came, and how many.
    """

    inbox: "asyncio.Queue[object]"
    prompt_tokens: int
    began_s: float
    is_counted: bool = False
    came: list[tuple[float, int]] = field(default_factory=list)

    def note(self, tokens: int) -> None:
        if tokens:
            self.came.append((time.monotonic(), tokens))
