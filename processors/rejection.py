"""Leviathan's rule: a verifier keeps drafts so that what it emits are draws from its own model.

A node x, drawn from the proposer's q, is accepted with probability min(1, p(x) / q(x)). The first
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
import torch
from torch import Tensor

from processors.token_tree import Floats, Ints


def reject(
    p: Tensor, q: Tensor, tokens: Ints, sizes: Ints, uniforms: Floats, noise: Tensor
) -> tuple[Ints, Ints]:
    """One level's walk down the drafts, of width 1, of B rows: accepted nodes and emitted token.

    A node is accepted if uniform * q < p at its token. Draws are argmaxes of log-probability plus
    noise, ties to the lowest id. A residual that rounding leaves without any mass counts as p.
    Waits for the device once.

    Args:
        p: [sum(sizes + 1), V] float64 probabilities of the verifier, row after row: after the
            root, then after each node.
        q: [sum(sizes), V] float64 probabilities that each node was drawn from, at its parent.
        tokens: [B, W] the nodes, of which row i has the first `sizes[i]`.
        uniforms: [sum(sizes)] in [0, 1), of each node.
        noise: [sum(sizes + 1), V] float64 standard Gumbel, for a draw after each context of `p`.

    Returns:
        accepted [B], and the token [B] that stands after the accepted nodes.
    """
    rows, steps = np.nonzero(np.arange(tokens.shape[1]) < sizes[:, None])
    starts = np.cumsum(sizes + 1) - (sizes + 1)  # of each row in p
    nodes = _to_device(np.stack((starts[rows] + steps, tokens[rows, steps], rows, steps)), p)
    context, token, row, step = nodes
    roots, limits = _to_device(np.stack((starts, sizes)), p)
    threshold = _to_device(uniforms, p) * q.gather(1, token.unsqueeze(1)).squeeze(1)
    kept = torch.zeros(tokens.shape, dtype=torch.int64, device=p.device)
    kept[row, step] = (threshold < p[context, token]).to(torch.int64)
    accepted = kept.cumprod(dim=1).sum(dim=1)
    stop = roots + accepted
    wanted = p.index_select(0, stop)
    if len(rows):
        first = roots - torch.arange(len(sizes), device=p.device)  # of each row in q
        refused = q.index_select(0, (first + accepted).clamp_(max=len(rows) - 1))
        residual = (wanted - refused).clamp_(min=0)
        drawn_anew = (accepted < limits) & (residual > 0).any(dim=1)
        wanted = torch.where(drawn_anew.unsqueeze(1), residual, wanted)
    emitted = wanted.log().add_(noise.index_select(0, stop)).argmax(dim=1)
    both = torch.stack((accepted, emitted)).cpu().numpy()  # the one wait
    return both[0], both[1]


def _to_device(values: Ints | Floats, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device, non_blocking=True)
