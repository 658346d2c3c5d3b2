"""Reservation: the prompt tokens of the next cycle, so that promised prompts are read in time.

A first token comes at the end of its cycle, after all else that is read in it. So no cycle ends
after the earliest deadline of the unread prompts: it reads as much as fits until then beside the
decoding requests, by deadline. Prompts are in time if such cycles, one after the other, read them
all.

`times` are of cycles beside their decoding, a cycle reads `chunk` prompt tokens at most, and
prompts are sorted by deadline.
Pure. Ours; it reserves what SLOs-Serve's program counts, the tokens until each deadline.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from specrouter.profile.batch_time import BatchTime
from specrouter.slo.serve.load import Prompt


def first_chunk(
    times: BatchTime, chunk: int, prompts: Sequence[Prompt], since_ms: float = 0.0
) -> int | None:
    """Return the first cycle's tokens, after `since_ms`, if all prompts are in time; else None."""
    left, now_ms, first = sum(each.tokens for each in prompts), since_ms, 0
    whole_ms = times.ms(chunk)
    read = 0  # tokens of the current prompt
    for prompt in prompts:
        while (rest := prompt.tokens - read) > 0:
            until_ms = prompt.deadline_ms - now_ms
            cycles = min(rest // chunk, math.floor(max(0.0, until_ms) / whole_ms))
            if cycles:
                tokens, took_ms = cycles * chunk, cycles * whole_ms
            else:
                tokens = min(times.tokens_within(until_ms), chunk, left)
                if tokens < min(rest, chunk):
                    return None
                took_ms = times.ms(tokens)
            first = first or min(tokens, chunk)
            now_ms, left, read = now_ms + took_ms, left - tokens, read + tokens
        read -= prompt.tokens
    return first


def longest_ms(
    times: BatchTime, chunk: int, prompts: Sequence[Prompt], chunks: Sequence[int]
) -> float:
    """Return the most time of a next cycle that reads these chunks and leaves all in time after it.

    It is found to a millisecond, and at least the time of these chunks and the decoding. Not all of
    the prompts can wait.
    """
    least_ms = times.ms(sum(chunks))
    most_ms = min(each.deadline_ms for each in prompts if not each.can_wait)
    rest = [
        replace(each, tokens=each.tokens - read)
        for each, read in zip(prompts, chunks, strict=True)
        if read < each.tokens
    ]
    if most_ms <= least_ms or first_chunk(times, chunk, rest, most_ms) is not None:
        return max(least_ms, most_ms)
    low_ms, high_ms = least_ms, most_ms
    while high_ms - low_ms > 1.0:
        middle_ms = (low_ms + high_ms) / 2.0
        if first_chunk(times, chunk, rest, middle_ms) is None:
            high_ms = middle_ms
        else:
            low_ms = middle_ms
    return low_ms
