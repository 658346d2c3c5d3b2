"""What a cycle is worth: one function, asked before drafting (which requests take part, which
shape) and after it (which nodes the target verifies).

A request that is to attain its objective needs `rate` tokens per millisecond, hence `rate * ms` of
a cycle that takes `ms`. The value of a cycle per millisecond is the sum over its requests of

    [needed / (1 + (needed / tokens)^5)  +  SPARE_TOKEN * tokens] / ms,     needed = rate * ms

The first part counts the tokens that the objective needs, as far as they are attainable: half of
them where the request gets what it needs, hardly any where it gets far less. So time goes to those
whom it helps. Every token beyond that counts SPARE_TOKEN.

`ms` is the cycle without its prompts: they are read whatever is drafted, so their time says nothing
about how many nodes pay.

Pure functions on arrays.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_HORIZON_TOKENS = 32  # within which a request that fell behind is to be on time again
_MARGIN = 1.2  # of safety: cycles that read prompts are slower than the usual
UNATTAINABLE = 2.5  # needs beyond so many times what could be gained at best are given up
SPARE_TOKEN = 0.3  # value of a token that no objective needs


def needed_rates(decode_ms: Floats, decoded: Ints, remaining: Ints, tpot_ms: Floats) -> Floats:
    """[B] tokens per millisecond that bring each request to its objective; 0 without one.

    AdaServe's need (section 3), made good over the next tokens instead of at once: one slow cycle
    must not buy nodes of little value.

    Args:
        decode_ms: since each request's first token.
        decoded: tokens after it.
        remaining: tokens that the request may still gain.
        tpot_ms: the objectives; NaN without one.
    """
    left = np.clip(remaining, 1, _HORIZON_TOKENS)
    with np.errstate(divide="ignore", over="ignore"):  # of TPOTs that are next to 0, or endless
        left_ms = tpot_ms * (decoded + left) - decode_ms
        rates = np.where(left_ms > 0.0, _MARGIN * left / np.maximum(left_ms, 0.0), np.inf)
    return np.where(np.isnan(tpot_ms), 0.0, rates)


def attainable(rates: Floats, most: Floats) -> Floats:
    """The rates of who is worth helping; 0 for who needs more than `UNATTAINABLE` times `most`.

    Args:
        most: tokens per millisecond that each could gain at best, in a shape that broadcasts. Where
            that is no number, nobody is.
    """
    return np.where(rates < UNATTAINABLE * most, rates, 0.0)


def value(tokens: Floats, rates: Floats, ms: Floats) -> Floats:
    """Value per millisecond of what each request gets of a cycle; in shapes that broadcast.

    Args:
        tokens: that each request is expected to gain, at least 1.
        rates: of `attainable`: finite; 0: nothing that could be attained.
    """
    ratio = rates * ms / tokens
    squared = ratio * ratio
    worth: Floats = rates / (1.0 + squared * squared * ratio) + SPARE_TOKEN * tokens / ms
    return worth
