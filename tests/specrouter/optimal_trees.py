"""AdaServe's second algorithm node by node, as the paper writes it.

Trees are finite here, with everything known of them. Line numbers are those of the pseudocode in
EuroSys '26. Nodes are `(request, index)` pairs. GetTop breaks ties as `Candidates.order` does: the
shallower node, then the lower request and index; it knows no nodes of probability 0 and finds
nothing in an exhausted tree.
"""

from dataclasses import dataclass

import numpy as np

from specrouter.cycle import Candidates
from specrouter.slo.tree_selection import Bools, Floats, Ints

Node = tuple[int, int]
ROOT = -1


def expected_tokens(candidates: Candidates, chosen: Bools, root_credit: float = 1.0) -> Floats:
    """[B] tokens that the chosen nodes and the root promise (Equation 5's left side)."""
    expected: Floats = root_credit + np.where(chosen, candidates.worth, 0.0).sum(axis=1)
    return expected


@dataclass(frozen=True, eq=False)
class Forest:
    """One tree per request, [B, W] each; `depths` are 0 where there is no node."""

    parents: Ints
    depths: Ints
    worth: Floats  # f(v), the path's probability

    @property
    def candidates(self) -> Candidates:
        return Candidates(self.worth, self.depths)

    def nodes(self, request: int | None = None) -> set[Node]:
        """Those of one request, or of all."""
        there = zip(*np.nonzero(self.worth), strict=True)
        return {(int(i), int(j)) for i, j in there if request in (None, i)}

    def f(self, node: Node) -> float:
        return float(self.worth[node])

    def parent(self, node: Node) -> Node | None:
        """None is the root, which is in every tree."""
        index = int(self.parents[node])
        return None if index == ROOT else (node[0], index)

    def get_top(self, nodes: set[Node]) -> Node | None:
        return min(nodes, key=lambda v: (-self.f(v), self.depths[v], v), default=None)

    def is_connected(self, nodes: set[Node]) -> bool:
        return all(self.parent(v) is None or self.parent(v) in nodes for v in nodes)


def nodes_of(mask: Bools) -> set[Node]:
    return {(int(i), int(j)) for i, j in zip(*np.nonzero(mask), strict=True)}


def algorithm_2(
    candidates: Forest,
    A: list[float],
    B: int,
    n_max: int,
    d: int,
    root: float = 1.0,
    neediest_first: bool = True,
) -> set[Node]:
    """Algorithm 2 from line 9 on, to the letter: B counts the roots and is overspent by one."""
    n = len(A)
    B = B - n  # 7
    added: set[Node] = set()  # 3
    size = [1 for _ in A]  # 5, |T| with its root
    n_acc = [root for _ in A]  # 6
    for i in sorted(range(n), key=lambda i: -A[i] if neediest_first else A[i]):  # 9-11
        a_cap = min(A[i], d + 1)
        while n_acc[i] < a_cap and size[i] < n_max and B >= 0:  # 12
            v = candidates.get_top(candidates.nodes(i) - added)  # 13
            if v is None:
                break
            size[i] += 1
            n_acc[i] += candidates.f(v)
            added.add(v)
            B -= 1
    while B >= 0:  # 18, throughput-optimized selection
        v = candidates.get_top(candidates.nodes() - added)
        if v is None:
            break
        added.add(v)
        B -= 1
    return added


def random_forest(rng: np.random.Generator, requests: int, nodes: int) -> Forest:
    """Trees of up to `nodes` nodes in shuffled places; siblings' probabilities sum to at most 1.

    Half of the forests have coarse probabilities, so that many worths tie or are 0, also those of
    parent and child.
    """
    shape = (requests, nodes)
    parents, depths = np.full(shape, ROOT), np.zeros(shape, dtype=np.int64)
    worth = np.zeros(shape)
    coarse = rng.random() < 0.5
    for row in range(requests):
        places = rng.permutation(nodes)[: rng.integers(0, nodes + 1)].tolist()
        rest = dict.fromkeys([ROOT, *places], 1.0)  # that further children may have
        for born, place in enumerate(places):
            parent = [ROOT, *places[:born]][int(rng.integers(max(0, born - 4), born + 1))]
            share = rng.choice([0.0, 0.25, 0.5, 1.0]) if coarse else rng.random() * rest[parent]
            given_parent = min(float(share), rest[parent])
            rest[parent] -= given_parent
            above = (0, 1.0) if parent == ROOT else (depths[row, parent], worth[row, parent])
            parents[row, place], depths[row, place] = parent, above[0] + 1
            worth[row, place] = above[1] * given_parent
    return Forest(parents, depths, worth)
