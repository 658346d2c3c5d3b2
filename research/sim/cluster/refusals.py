"""Refusals of a simulated cluster, and whether what callers were told of them was true.

Pure.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Because = Literal["room", "objective"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A 503.

    Attributes:
        because: all queues were full, or no replica could attain the objective.
        retry_after_s: that the caller was told, before it is made whole seconds.
        replica: of which the caller was told; `ahead`: who is to be given a row there before it,
            and itself. Of full queues only.
    """

    at_s: float
    because: Because
    retry_after_s: float
    prompt_tokens: int
    replica: str = ""
    ahead: int = 0


@dataclass(frozen=True)
class Service:
    """What was served meanwhile. `rows_given_s`: of each replica, when requests were given rows;
    `taken`: when a request was taken with a promise, and the tokens of its prompt. By time."""

    rows_given_s: Mapping[str, Sequence[float]]
    taken: Sequence[tuple[float, int]]


def header_s(wait_s: float) -> float:
    """As `Retry-After` has it: whole seconds, at least one."""
    return float(max(1, math.ceil(wait_s)))


def true_wait_s(refusal: Refusal, service: Service) -> float | None:
    """How long it would have taken. With full queues: until so many had been given rows there. With
    an objective: until a request was promised its own whose prompt was no shorter. None: it never
    came to that."""
    if refusal.because == "room":
        given = service.rows_given_s[refusal.replica]
        place = bisect_right(given, refusal.at_s) + refusal.ahead - 1
        return given[place] - refusal.at_s if place < len(given) else None
    first = bisect_right(service.taken, (refusal.at_s, math.inf))
    came = (at_s for at_s, tokens in service.taken[first:] if tokens >= refusal.prompt_tokens)
    at_s = next(came, None)
    return None if at_s is None else at_s - refusal.at_s


def told_and_true(refusals: Sequence[Refusal], service: Service) -> list[tuple[float, float]]:
    """Of all whose truth is known, in whole seconds as a header has them, and at least one."""
    found = [(one.retry_after_s, true_wait_s(one, service)) for one in refusals]
    return [(header_s(told), max(1.0, true)) for told, true in found if true is not None]
