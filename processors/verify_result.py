"""VerifyResult: what a verifier accepts of token trees, and what it would choose itself.

`VerifierForward` is the basis of the decision, `VerifyResult` is the decision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from processors.contexts import Contexts
from processors.drafts import DraftResult
from processors.pack import FedTree, PackResult
from processors.token_tree import ROOT, Bools, Floats, Ints, TokenTree


@dataclass(frozen=True, eq=False)
class VerifierForward:
    """One verifier's forward over trees of B rows, at most W nodes each."""

    tree: TokenTree
    places: Ints  # [B, W + 1] where the logits after the root and after each node are, or -1
    contexts: Contexts  # of the same n places
    pack: PackResult
    earlier: Mapping[int, Tensor]  # by row: logits [n, V] before roots, if requested

    @property
    def logits(self) -> Tensor:
        """Logits after roots and nodes, row after row, [sum(sizes + 1), V]."""
        return self.pack.logits


@dataclass(frozen=True, eq=False, kw_only=True)
class VerifyResult(VerifierForward):
    """A forward and the decisions on its B rows, on the host except for the logits."""

    accepted: Bools  # [B, W] nodes on the verifier's walk
    choices: Ints  # [B, W + 1] the verifier's choice after the root and after each node
    choice_log_probs: Floats  # [B, W + 1]
    node_log_probs: Floats  # [B, W] of each node after its parent, by the verifier
    finite: Bools  # [B, W + 1] the choice there is an allowed token with a finite score
    broken: Bools  # [B, W + 1] the logits there hold NaN, on the walk or not

    @property
    def fed(self) -> FedTree:
        return self.pack.fed

    @cached_property
    def sound(self) -> Bools:
        """Mask of rows, [B], whose choices on the walk are all finite."""
        return np.asarray((self.finite | ~self._on_walk).all(axis=1))

    @property
    def broken_rows(self) -> Bools:
        """Mask of rows, [B], with NaN in the logits on their walk."""
        return np.asarray((self.broken & self._on_walk).any(axis=1))

    @property
    def poisoned(self) -> Bools:
        """Mask of nodes, [B, W], off the walk after which logits hold NaN.

        Their slots may hold NaN too, and a masked NaN would spoil the row's next forward.
        """
        return self.broken[:, 1:] & ~self.accepted & self.tree.real

    @property
    def _on_walk(self) -> Bools:
        """Mask of roots and nodes on the walk, [B, W + 1]."""
        return np.concatenate((np.ones((len(self.accepted), 1), np.bool_), self.accepted), 1)

    def sound_length(self, index: int) -> int:
        """Return how many tokens of a row's path precede the first choice that is not finite."""
        finite = self.finite[index, np.append(ROOT, self.walk(index)) + 1]
        return len(finite) if finite.all() else int(np.argmin(finite))

    def walk(self, index: int) -> Ints:
        """Return the nodes on a row's walk, from the root down."""
        nodes = np.flatnonzero(self.accepted[index])
        walk: Ints = nodes[np.argsort(self.tree.depths[index, nodes])]
        return walk

    def path(self, index: int) -> Ints:
        """Return the accepted tokens of a row, then the verifier's own choice, [accepted + 1]."""
        walk = self.walk(index)
        last = walk[-1] if len(walk) else ROOT
        return np.append(self.tree.tokens[index, walk], self.choices[index, last + 1])

    def draft(self, is_path: bool) -> DraftResult:
        """Return the draft that the next level verifies.

        It is the accepted path and the choice at its end, or the whole tree, rescored, with the
        verifier's own choices as further children.
        """
        tree = self._walks() if is_path else self._extended()
        nowhere = np.full((len(tree.rows), 1), -1)  # no logits after the verifier's own choices
        places = np.concatenate((self.places, nowhere), axis=1)
        return DraftResult(tree, self.logits, places, self.fed)

    def _walks(self) -> TokenTree:
        """Return the tree of the rows' paths; the last node of each is the verifier's choice."""
        tree = self.tree
        paths = [self.path(index) for index in range(len(tree.rows))]
        width = max(map(len, paths), default=0)
        tokens = np.zeros((len(paths), width), dtype=np.int64)
        origins = np.zeros_like(tokens)
        log_probs = np.zeros(tokens.shape)
        for index, path in enumerate(paths):
            tokens[index, : len(path)] = path
            walk = self.walk(index)
            origins[index, : len(walk)] = walk
            origins[index, len(walk)] = tree.tokens.shape[1]
            log_probs[index, : len(walk)] = self.node_log_probs[index, walk]
            last = walk[-1] if len(walk) else ROOT
            log_probs[index, len(walk)] = self.choice_log_probs[index, last + 1]
        made = TokenTree.path(tree.rows, tokens, np.array([len(path) for path in paths]))
        total = np.where(made.real, np.cumsum(log_probs, axis=1), -np.inf)
        return replace(made, origins=origins, log_probs=total)

    def _extended(self) -> TokenTree:
        """Return all nodes with the verifier's log-probs, and its choice after each as a child."""
        tree = self.tree
        batch, width = tree.tokens.shape
        real = tree.real
        # A choice that is a child already is not added again.
        places = np.concatenate((np.ones((batch, 1), np.bool_), real), axis=1)
        after_parent = np.take_along_axis(self.choices, tree.parents + 1, axis=1)
        chosen = (tree.tokens == after_parent) & real
        has_child = np.zeros((batch, width + 1), dtype=np.int64)
        np.add.at(has_child, (np.nonzero(chosen)[0], tree.parents[chosen] + 1), 1)
        added = places & (has_child == 0)
        path_log_probs = np.zeros((batch, width + 1))
        for depth in range(1, tree.height + 1):  # parents before children
            here = np.nonzero(tree.depths == depth)
            above = path_log_probs[here[0], tree.parents[here] + 1]
            path_log_probs[here[0], here[1] + 1] = above + self.node_log_probs[here]
        depths = np.concatenate((np.zeros((batch, 1), np.int64), tree.depths), axis=1)
        parents = np.broadcast_to(np.arange(-1, width), added.shape)
        whole = TokenTree(
            rows=tree.rows,
            tokens=np.concatenate((tree.tokens, self.choices), axis=1),
            parents=np.concatenate((tree.parents, parents), axis=1),
            depths=np.concatenate((tree.depths, depths + 1), axis=1),
            log_probs=np.concatenate(
                (path_log_probs[:, 1:], path_log_probs + self.choice_log_probs), axis=1
            ),
            origins=np.concatenate(
                (np.broadcast_to(np.arange(width), real.shape), 0 * parents + width), 1
            ),
            sizes=np.full(batch, 2 * width + 1),
        )
        return whole.keep(np.concatenate((real, added), axis=1))


def joined(
    tree: TokenTree,
    places: Ints,
    pack: PackResult,
    earlier: Mapping[int, Tensor],
    found: Sequence[VerifyResult | None],
) -> VerifyResult:
    """Join the results of rows that were tried one by one.

    `found` may be empty, if only prompts were read. None is for a row without a valid choice
    (`finite`).
    """
    width = tree.tokens.shape[1]
    places_of_one = np.zeros((1, width + 1))
    nothing = {
        "accepted": np.zeros((1, width), np.bool_),
        "choices": places_of_one.astype(np.int64),
        "choice_log_probs": np.full_like(places_of_one, -np.inf),  # nothing is passed on
        "node_log_probs": np.zeros((1, width)),
        "finite": places_of_one.astype(np.bool_),
        "broken": places_of_one.astype(np.bool_),
    }
    arrays = {
        name: np.concatenate(
            [none[:0], *(none if one is None else getattr(one, name) for one in found)]
        )
        for name, none in nothing.items()
    }
    no_rows = tree.rows[:0]
    contexts = Contexts(rows=no_rows, positions=no_rows, depths=no_rows)
    return VerifyResult(tree, places, contexts, pack, earlier, **arrays)
