"""How requests came out: the ends of their stages, and how fast their tokens came.

Pure: no clock, no state. Not here: what is asked for (`objective`).
"""

from collections.abc import Sequence

import numpy as np

from specrouter.request.objective import Stage

RUN_TOKENS = 10  # over so many tokens TPOT is reported along a request


def attained_stages(
    stages: Sequence[Stage], ends: Sequence[int], came_ms: Sequence[float]
) -> tuple[bool, ...]:
    """Of the stages that had tokens, which kept their TPOT.

    Args:
        ends: after how many output tokens each stage ended, of those that have.
        came_ms: when each output token came.
    """
    bounds = [1, *ends, len(came_ms)]
    kept = []
    for stage, began, ended in zip(stages, bounds, bounds[1:], strict=False):
        tokens = min(ended, len(came_ms)) - began
        took_ms = came_ms[began + tokens - 1] - came_ms[began - 1] if tokens > 0 else 0.0
        kept.append(took_ms <= stage.tpot_ms * max(tokens, 0) * (1.0 + 1e-9))
    return tuple(kept)


def tpot_of_runs(commits: Sequence[tuple[float, int]]) -> list[float]:
    """Mean time of a token, in milliseconds, over every full run of 10 after the first token.

    Tokens of one commit share the time since the one before it evenly.

    Args:
        commits: when tokens came, in seconds, and how many; at least 1 each.
    """
    counts = np.cumsum([count for _, count in commits])
    if not len(counts):
        return []
    came_s = [commits[0][0], *(came_s for came_s, _ in commits)]
    ends = np.arange(1, counts[-1] + 1, RUN_TOKENS)
    ends_s = np.interp(ends, [1, *counts], came_s)
    return [float(each) for each in np.diff(ends_s) * (1000 / RUN_TOKENS)]
