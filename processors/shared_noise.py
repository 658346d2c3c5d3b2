"""Acceptance by shared noise: every model of a chain chooses with the same noise.

The choice at an output position is the argmax of the processed logits plus Gumbel noise of (seed,
position), plain argmax at temperature 0. It depends on the verifier's logits and the noise alone. A
drafted token is accepted if it equals the verifier's choice: walk down from the root, follow the
child that is the choice there, stop if there is none, and emit that choice. So for any drafts, from
any number of levels, a seed gives one text, and its tokens follow the target's distribution.
Source: Daliri, Musco, Suresh, arXiv 2408.07978 (shared noise as a coupling).
"""

import numpy as np
import torch
from torch import Tensor

from processors.sampler import Sampler
from processors.token_tree import Floats
from processors.verify_result import VerifierForward, VerifyResult


def accept(sampler: Sampler, forward: VerifierForward, rescore: bool) -> VerifyResult:
    """Decide what a verifier accepts of the trees it has read, with one wait for the device.

    With `rescore`, it also finds log-probabilities of nodes and choices, for the next level.
    """
    if rescore:
        found = _rescored(sampler, forward)
    else:
        found = sampler.choose(forward.logits, forward.contexts)
    together = torch.cat([part.double() for part in found])
    values = together.cpu().numpy()  # the one wait; ids are exact in float64
    return _result(forward, values, rescore)


def _rescored(sampler: Sampler, forward: VerifierForward) -> tuple[Tensor, ...]:
    """Run `Sampler.rescore` for all nodes, row after row."""
    tree = forward.tree
    parents = np.take_along_axis(forward.places, tree.parents + 1, axis=1)[tree.real]
    return sampler.rescore(forward.logits, forward.contexts, parents, tree.tokens[tree.real])


def _result(forward: VerifierForward, values: Floats, rescored: bool) -> VerifyResult:
    """Return the result for `values` at all places.

    These are the choices, their scores, and if `rescored` the log-probabilities of choices and of
    nodes, one after the other.
    """
    tree, places = forward.tree, forward.places
    here = places >= 0
    count, nodes = int(here.sum()), int(tree.sizes.sum())
    choices = np.zeros(places.shape, dtype=np.int64)
    choices[here] = values[:count].astype(np.int64)
    best = values[count : 2 * count]
    choice_log_probs = np.zeros(places.shape)
    node_log_probs = np.zeros(tree.tokens.shape)
    if rescored:
        choice_log_probs[here] = np.minimum(values[2 * count : 3 * count], 0.0)
        node_log_probs[tree.real] = np.minimum(values[3 * count : 3 * count + nodes], 0.0)
    finite = np.ones(places.shape, dtype=np.bool_)
    finite[here] = np.isfinite(best)
    broken = np.zeros(places.shape, dtype=np.bool_)
    broken[here] = np.isnan(best)
    accepted = tree.matching(choices)
    return VerifyResult(
        **vars(forward),
        accepted=accepted,
        choices=choices,
        choice_log_probs=choice_log_probs,
        node_log_probs=node_log_probs,
        finite=finite,
        broken=broken,
    )
