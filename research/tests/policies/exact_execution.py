"""Exact execution of a set of requests, batch by batch, by earliest deadline: what plans promise.

Nothing of it is taken from the code that plans. The last token of a prompt is held back until the
last batch that ends in time, so that its request decodes no sooner than the plan has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specrouter.profile.batch_time import BatchTime

_EPS = 1e-6


@dataclass
class _Prompt:
    deadline_ms: float
    left: int
    tpot_ms: float


def misses_nothing(
    decoding_ms: Sequence[float],
    prompts: Sequence[tuple[float, int, float]],
    times: BatchTime,
    idle_ms: float,
) -> bool:
    """Args:
    decoding_ms: TPOT of each request that decodes; its next token is due after that time.
    prompts: deadline, tokens and TPOT of each.
    """
    waiting = [_Prompt(*each) for each in sorted(prompts, key=lambda each: each[0])]
    due = [(tpot_ms, tpot_ms) for tpot_ms in decoding_ms]  # when, TPOT
    longest = max([idle_ms, *decoding_ms, *(p.tpot_ms for p in waiting)])
    end_ms = max((p.deadline_ms for p in waiting), default=0.0) + 5 * longest
    now_ms = 0.0
    while now_ms < end_ms:
        batch_ms = min([tpot_ms for _, tpot_ms in due], default=idle_ms)
        now_ms, later_ms = now_ms + batch_ms, now_ms + 2 * batch_ms
        served = [at for at, (when, _) in enumerate(due) if when < later_ms - _EPS]
        room = times.tokens_within(batch_ms) - len(served)
        if room < 0 or any(due[at][0] < now_ms - _EPS for at in served):
            return False
        for at in served:
            due[at] = due[at][0] + due[at][1], due[at][1]
        for prompt in waiting:
            held = prompt.deadline_ms >= later_ms - _EPS
            read = min(room, prompt.left - held)
            room, prompt.left = room - read, prompt.left - read
            if not prompt.left:
                due.append((now_ms + prompt.tpot_ms, prompt.tpot_ms))
                later_ms = min(later_ms, now_ms + prompt.tpot_ms)
            elif prompt.deadline_ms < now_ms - _EPS or not held:
                return False
        if any(not p.left and p.deadline_ms < now_ms - _EPS for p in waiting):
            return False
        waiting = [p for p in waiting if p.left]
    return True
