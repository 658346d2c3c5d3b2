"""NgramDraftProcessor: drafts from each request's own tokens, without a model. Stateless.

A candidate is weighed as a model of the chain would choose: log-probability plus the noise of its
output position, then a softmax. The noise of what the table has not seen is not looked up: of all
those ids the best is `log(their mass)` plus one Gumbel variable, whose median stands for it.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from processors.drafts import DraftRequest
from processors.token_tree import ROOT, TokenTree
from statemgr import NgramTable, StateManager
from statemgr.ngram_table import MAX_ORDER

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# (row, output position, ids [n], which may repeat) -> the Gumbel noise [n], zeros if greedy.
NoiseLookup = Callable[[int, int, Ints], Floats]

_LEAST_PROBABLE = math.log(0.05)  # of a path that goes to a verifier
_MEDIAN_NOISE = 1.0 / math.log(2.0)  # exp of a Gumbel variable's median


class _Node(NamedTuple):
    token: int
    parent: int
    depth: int
    log_prob: float
    context: tuple[int, ...]  # the last tokens, its own included


class NgramDraftProcessor:
    def draft(
        self,
        table: NgramTable,
        manager: StateManager,
        noise: NoiseLookup,
        request: DraftRequest,
    ) -> TokenTree:
        """The tree that a beam search over the table finds, level after level.

        The rows are open in the table, which reads what it lacks of their tokens. A row whose
        tokens say nothing of what follows gets no nodes, nor does one of depth 0.
        """
        found = []
        columns = request.rows, request.output_positions, request.depths
        for row, position, depth in zip(*(column.tolist() for column in columns), strict=True):
            context = _context(table, manager, row) if depth else ()
            nodes: list[_Node] = []
            beam = [(ROOT, _Node(0, ROOT, 0, 0.0, context))]
            for step in range(depth):
                children = _children(table, noise, row, position + step, beam, request.width)
                if not children:
                    break
                beam = list(enumerate(children, len(nodes)))
                nodes += children
            found.append(nodes)
        return _tree(request.rows, found)


def context_distribution(
    table: NgramTable, manager: StateManager, row: int, path: Sequence[int] = ()
) -> Floats:
    """[V], what the table expects after a row's committed text and the tokens of `path`."""
    return table.distribution(row, (*_context(table, manager, row), *path))


def _context(table: NgramTable, manager: StateManager, row: int) -> tuple[int, ...]:
    """The last committed tokens of a row, after the table has read them all."""
    committed = manager.committed(row)
    table.sync(row, committed)
    return tuple(committed[-MAX_ORDER:].tolist())


def _children(
    table: NgramTable,
    noise: NoiseLookup,
    row: int,
    position: int,
    beam: Sequence[tuple[int, _Node]],
    width: int,
) -> list[_Node]:
    """The `width` most probable children of a level's nodes (with their indices), best first."""
    predicted = [table.predict(row, node.context) for _, node in beam]
    counts = [len(ids) for ids, _ in predicted]
    if not any(counts):
        return []
    ids = np.concatenate([ids for ids, _ in predicted])
    probabilities = np.concatenate([probabilities for _, probabilities in predicted])
    owners = np.repeat(np.arange(len(beam)), counts)
    perturbation = noise(row, position, ids)
    weights = probabilities * np.exp(perturbation)
    rest = np.maximum(1.0 - np.bincount(owners, probabilities, len(beam)), 0.0)
    if perturbation.any():
        rest *= _MEDIAN_NOISE
    totals = np.bincount(owners, weights, len(beam)) + rest
    before = np.array([node.log_prob for _, node in beam])
    log_probs = before[owners] + np.log(weights / totals[owners])
    children = []
    for index in np.argsort(-log_probs, kind="stable")[:width].tolist():
        log_prob = float(log_probs[index])
        if log_prob < _LEAST_PROBABLE:
            break
        parent, node = beam[owners[index]]
        token = int(ids[index])
        context = (*node.context, token)[-MAX_ORDER:]
        children.append(_Node(token, parent, node.depth + 1, log_prob, context))
    return children


def _tree(rows: Ints, found: Sequence[Sequence[_Node]]) -> TokenTree:
    sizes = np.array([len(nodes) for nodes in found], dtype=np.int64)
    shape = (len(rows), int(sizes.max(initial=0)))
    tokens, depths = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    parents, log_probs = np.full(shape, ROOT), np.full(shape, -np.inf)
    for index, nodes in enumerate(found):
        if nodes:
            here = (index, slice(len(nodes)))
            tokens[here], parents[here], depths[here], log_probs[here], _ = zip(*nodes, strict=True)
    places = np.arange(shape[1])
    origins = np.where(places < sizes[:, None], places, 0)
    return TokenTree(rows, tokens, parents, depths, log_probs, origins, sizes)
