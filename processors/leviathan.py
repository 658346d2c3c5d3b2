"""Leviathan's rule: a verifier keeps drafts so that what it emits are draws from its own model.

A node x, drawn from the drafter's q, is accepted with probability min(1, p(x) / q(x)). The first
node that is not is replaced by a draw from max(0, p - q), normalised; after a whole draft one more
is drawn from p. A row emits its accepted nodes and that one draw.

Why chains of any length stay exact. Whether there is an emission at position k depends on draws at
positions before k only: that all nodes before k were accepted. Given those, the token at k is a
draw from p after the tokens before it, whether it was accepted or drawn anew. So an intermediate's
emission is to the next level what a draft is to the first: tokens that were drawn one by one from a
known distribution, its own p, which is the next level's q. By induction every level emits draws
from its own model, the target included. Two ways to lose this:
- Hard rejection, which hands on the accepted nodes alone. Position k then exists only if its own
  token was accepted, so such tokens follow min(p, q), not p, and p is the wrong q for them.
- To cut a draft off at k because of the token at k, or of what was drawn at k before: lengths may
  depend on the text, on distributions, and on draws at earlier positions.

All noise is independent across positions and across levels, and at one (position, level) the
uniform and the Gumbel noise are independent of each other. It may be a pure function of both: what
one cycle discards lies beyond what it commits, and decided nothing about that.
Source: Leviathan, Kalman, Matias, arXiv 2211.17192, algorithm 1 and appendix A.1.
"""

import numpy as np
from torch import Tensor

from processors.token_tree import Bools, Floats, Ints


def accepted_lengths(p: Floats, q: Floats, sizes: Ints, uniforms: Floats) -> tuple[Ints, Bools]:
    """How many nodes of each of B drafts, of width 1, are accepted, [B]: uniform * q < p.

    Args:
        p, q: [sum(sizes)] float64, row after row: how probable a node is after its parent to the
            verifier, and to its drafter. NaN, where there is no distribution: not accepted.
        sizes: [B] nodes of each draft.
        uniforms: [sum(sizes)] in [0, 1), of each node.

    Returns:
        Beside it, [B] whether that was told by numbers. A node that was refused for NaN was not
        refused by the rule, and no draw can stand in its place.
    """
    rows = np.repeat(np.arange(len(sizes)), sizes)
    steps = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    margins = np.full((len(sizes), int(sizes.max(initial=0)) + 1), -1.0)
    margins[rows, steps] = p - uniforms * q
    accepted: Ints = (margins > 0).cumprod(axis=1).sum(axis=1)
    return accepted, ~np.isnan(margins[np.arange(len(sizes)), accepted])


def emit(p: Tensor, q: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The token that stands after the accepted nodes of each of B drafts, [B], and its score [B]:
    finite, or where any number is NaN, NaN.

    A draw is the argmax of log-probability plus noise, ties to the lowest id. A residual that
    rounding leaves without any mass counts as p. Does not wait for the device.

    Args:
        p: [B, V] float64 probabilities of the verifier there.
        q: [B, V] float64 probabilities that the refused node was drawn from; 0 if none was refused.
        noise: [B, V] float64 standard Gumbel.
    """
    residual = (p - q).clamp_(min=0)
    has_mass = residual.amax(dim=1, keepdim=True) != 0  # or NaN
    values, ids = residual.where(has_mass, p).log_().add_(noise).max(dim=1)
    return ids, values
