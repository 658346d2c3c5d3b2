"""NgramDraftProcessor: drafts from texts that exist already, without a model and without state.

A candidate is weighted as a model of the chain would choose: log-probability plus the noise of its
output position, then a softmax. The noise of ids that the table has not seen is not looked up: the
best of them is `log(their mass)` plus one Gumbel variable, for which its median is used.

Drafting a token costs almost nothing, so a path continues as long as it is likely to be right.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from processors.drafts import DraftRequest
from processors.token_tree import ROOT, Floats, Ints, TokenTree
from statemgr import StateManager, SuffixTable
from statemgr.suffix_table import Place

# (row, output position, ids [n], which may repeat) -> the Gumbel noise [n], zeros if greedy.
NoiseLookup = Callable[[int, int, Ints], Floats]

_LEAST_PROBABLE = math.log(0.05)  # least log-probability of a path for a verifier
_MEDIAN_NOISE = 1.0 / math.log(2.0)  # exp of a Gumbel variable's median


class _Node(NamedTuple):
    token: int
    parent: int
    depth: int
    log_prob: float
    where: Place


class NgramDraftProcessor:
    def path(
        self,
        table: SuffixTable,
        text: Ints,
        noise: NoiseLookup,
        row: int,
        position: int,
        most: int,
        least: float,
    ) -> list[tuple[int, float]]:
        """Return the most probable continuation of a row's text [n], with each token's probability.

        Probabilities are conditional on the tokens before. There are at most `most` tokens; after
        the first one, the path continues only while its probability is at least `least`.
        """
        found, together = list[tuple[int, float]](), 1.0
        node = _Node(0, ROOT, 0, 0.0, table.end(row, text))
        while len(found) < most:
            below = _child(table, noise, row, position + len(found), [(ROOT, node)], 1)
            if not below:
                break
            share = math.exp(below[0].log_prob - node.log_prob)
            together *= share
            if found and together < least:
                break
            [node] = below
            found.append((node.token, share))
            if together < least:
                break
        return found

    def draft(
        self,
        table: SuffixTable,
        manager: StateManager,
        noise: NoiseLookup,
        request: DraftRequest,
    ) -> TokenTree:
        """Return the tree that a beam search over the table finds, level after level.

        The rows are open in the table, which reads the tokens that it lacks. A row without
        predictions gets no nodes, nor does one of depth 0.
        """
        found: list[list[_Node]] = []
        columns = request.rows, request.output_positions, request.depths
        for row, position, depth in zip(*(one.tolist() for one in columns), strict=True):
            nodes: list[_Node] = []
            found.append(nodes)
            if not depth:
                continue
            beam = [(ROOT, _Node(0, ROOT, 0, 0.0, table.end(row, manager.committed(row))))]
            for step in range(depth):
                find = _children if request.width > 1 else _child
                children = find(table, noise, row, position + step, beam, request.width)
                if not children:
                    break
                beam = list(enumerate(children, len(nodes)))
                nodes += children
        return _tree(request.rows, found)


def _children(
    table: SuffixTable,
    noise: NoiseLookup,
    row: int,
    position: int,
    beam: Sequence[tuple[int, _Node]],
    width: int,
) -> list[_Node]:
    """Return the `width` most probable children of nodes with indices, best first."""
    predicted = [table.predict(row, node.where) for _, node in beam]
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
        where = table.after(row, node.where, token)
        children.append(_Node(token, parent, node.depth + 1, log_prob, where))
    return children


def _child(
    table: SuffixTable,
    noise: NoiseLookup,
    row: int,
    position: int,
    beam: Sequence[tuple[int, _Node]],
    width: int,
) -> list[_Node]:
    """Return the best child of a single node, like `_children`.

    A long path has many such nodes, most with one candidate, and numpy would take several times as
    long.
    """
    [(parent, node)] = beam
    ids, probabilities = table.predict(row, node.where)
    if not len(ids):
        return []
    perturbation = noise(row, position, ids).tolist()
    values = probabilities.tolist()
    rest = max(1.0 - math.fsum(values), 0.0)
    if any(perturbation):
        rest *= _MEDIAN_NOISE
    weights = [p * math.exp(g) for p, g in zip(values, perturbation, strict=True)]
    best = max(range(len(weights)), key=weights.__getitem__)
    log_prob = node.log_prob + math.log(weights[best] / (math.fsum(weights) + rest))
    if log_prob < _LEAST_PROBABLE:
        return []
    token = int(ids[best])
    return [_Node(token, parent, node.depth + 1, log_prob, table.after(row, node.where, token))]


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
    return TokenTree(
        rows=rows,
        tokens=tokens,
        parents=parents,
        depths=depths,
        log_probs=log_probs,
        origins=origins,
        sizes=sizes,
    )
