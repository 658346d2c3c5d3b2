"""The value of a cycle, as one function for two choices.

It is used before drafting (which requests take part, and with which shape) and after it (which
nodes the target verifies). A request that is to attain its objective needs `rate` tokens per
millisecond, hence `rate * ms` of a cycle that takes `ms`. The value of a cycle per millisecond is
the sum over its requests of

    [needed / (1 + (needed / tokens)^5)  +  SPARE_TOKEN * tokens] / ms,     needed = rate * ms

The first part counts the tokens that the objective needs, as far as they are attainable: half of
them where the request gets what it needs, hardly any where it gets far less. So time goes to the
requests that it helps. Every expected token also counts SPARE_TOKEN.

`ms` is the cycle without its prompts: they are read in any case, so their time must not influence
how many nodes pay.

Pure functions on arrays.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_HORIZON_TOKENS = 32  # tokens within which a request that fell behind should be on time again
_MARGIN = 1.2  # safety factor: cycles that read prompts are slower than usual
UNATTAINABLE = 2.5  # needs beyond this multiple of the best possible gain are given up
SPARE_TOKEN = 0.3  # value of a token that no objective needs


def needed_rates(decode_ms: Floats, decoded: Ints, remaining: Ints, tpot_ms: Floats) -> Floats:
    """Return the tokens per millisecond [B] that each request needs; 0 without an objective.

    AdaServe's need (section 3), spread over the next tokens instead of met at once: one slow cycle
    must not buy nodes of little value.

    Args:
        decode_ms: time since each request's first token.
        decoded: tokens after it.
        remaining: tokens that the request may still gain.
        tpot_ms: the objectives; NaN without one.
    """
    left = np.clip(remaining, 1, _HORIZON_TOKENS)
    with np.errstate(divide="ignore", over="ignore"):  # TPOTs near 0, or infinite
        left_ms = tpot_ms * (decoded + left) - decode_ms
        rates = np.where(left_ms > 0.0, _MARGIN * left / np.maximum(left_ms, 0.0), np.inf)
    return np.where(np.isnan(tpot_ms), 0.0, rates)


def attainable(rates: Floats, most: Floats) -> Floats:
    """Return the rates of the requests worth helping, and 0 for the others.

    A request is given up if it needs `UNATTAINABLE` times `most` or more.

    Args:
        rates: [B] of `needed_rates`.
        most: tokens per millisecond that each could gain at best, in a shape that broadcasts. Where
            it is NaN, the rate becomes 0.
    """
    return np.where(rates < UNATTAINABLE * most, rates, 0.0)


def value(tokens: Floats, rates: Floats, ms: Floats) -> Floats:
    """Return the value per millisecond of each request's part of a cycle; shapes broadcast.

    Args:
        tokens: tokens that each request is expected to gain, at least 1.
        rates: result of `attainable`: finite; 0: nothing could be attained.
        ms: time of the cycle without its prompts.
    """
    ratio = rates * ms / tokens
    squared = ratio * ratio
    worth: Floats = rates / (1.0 + squared * squared * ratio) + SPARE_TOKEN * tokens / ms
    return worth
