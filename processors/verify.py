"""VerifyProcessor: a model judges token trees, and says what it would choose itself. Stateless.

One rule at every level: walk down from the root, follow the child that equals the verifier's
choice, stop where there is none, and take that choice. The target's walk is committed. An
intermediate re-scores every node and adds its own choices as children (`Verdict.proposal`); under
hard rejection only the accepted path goes on (SpecRouter, section 4.3).
`verify_by_rejection` has Leviathan's rule in the place of the walk (`processors.rejection`).
A row's grammar masks every verifier, at every place of its tree (`processors.grammar`).
The target's prefill chunks travel in the same pack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.packed_model import PackedModel
from processors.contexts import Contexts
from processors.drafted_paths import DraftedPaths
from processors.pack import FedTree, PackPlan, PackResult, lag, run_pack, tree_contexts
from processors.proposal import Proposal
from processors.sampler import Sampler
from processors.token_tree import ROOT, Floats, Ints, TokenTree
from statemgr import ModelState, StateManager

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Verdict:
    """Of the B rows of a verified tree, on the host but for the logits."""

    tree: TokenTree
    accepted: Bools  # [B, W] nodes on the verifier's walk
    choices: Ints  # [B, W + 1] the verifier's choice after the root and after each node
    choice_log_probs: Floats  # [B, W + 1]
    node_log_probs: Floats  # [B, W] of each node after its parent, by the verifier
    finite: Bools  # [B, W + 1] the choice there is one of an allowed token by real numbers
    broken: Bools  # [B, W + 1] the logits there hold NaN, on the walk or not
    logits: Tensor  # [sum(sizes + 1), V]
    places: Ints  # [B, W + 1] where the logits after the root and after each node stand, or -1
    fed: FedTree
    pack_tokens: int
    earlier: Mapping[int, Tensor]  # by row: logits [n, V] before roots, where they were asked for

    @property
    def lengths(self) -> Ints:
        """[B] nodes on the walk."""
        lengths: Ints = self.accepted.sum(axis=1)
        return lengths

    @cached_property
    def sound(self) -> Bools:
        """[B]: are all choices on the walk finite?"""
        return np.asarray((self.finite | ~self._on_walk).all(axis=1))

    @property
    def broken_rows(self) -> Bools:
        """[B] rows on whose walk logits hold NaN."""
        return np.asarray((self.broken & self._on_walk).any(axis=1))

    @property
    def poisoned(self) -> Bools:
        """[B, W] nodes off the walk after which logits hold NaN.

        So may their slots, and a masked NaN would poison the row's next forward.
        """
        return self.broken[:, 1:] & ~self.accepted & self.tree.real

    @property
    def _on_walk(self) -> Bools:
        """[B, W + 1] roots and nodes."""
        return np.concatenate((np.ones((len(self.accepted), 1), np.bool_), self.accepted), 1)

    def sound_length(self, index: int) -> int:
        """How many tokens of a row's path come before the first choice that is not finite."""
        finite = self.finite[index, np.append(ROOT, self.walk(index)) + 1]
        return len(finite) if finite.all() else int(np.argmin(finite))

    def walk(self, index: int) -> Ints:
        """The nodes on a row's walk, from the root down."""
        nodes = np.flatnonzero(self.accepted[index])
        walk: Ints = nodes[np.argsort(self.tree.depths[index, nodes])]
        return walk

    def path(self, index: int) -> Ints:
        """Accepted tokens of a row, then the verifier's own choice, [accepted + 1]."""
        walk = self.walk(index)
        last = walk[-1] if len(walk) else ROOT
        return np.append(self.tree.tokens[index, walk], self.choices[index, last + 1])

    def proposal(self, hard_rejection: bool, is_path: bool) -> Proposal:
        """What the next level is to verify: the accepted path, the walk, or the whole tree
        re-scored with the verifier's own choices as further children."""
        if hard_rejection or is_path:
            paths = [self.path(index) for index in range(len(self.tree.rows))]
            tree = self._walks([path[:-1] for path in paths] if hard_rejection else paths)
        else:
            tree = self._extended()
        nowhere = np.full((len(tree.rows), 1), -1)  # the logits after the verifier's own choices
        places = np.concatenate((self.places, nowhere), axis=1)
        return Proposal(tree, self.logits, places, self.fed, is_masked=True)

    def _walks(self, paths: list[Ints]) -> TokenTree:
        """The tree of the walks, as far as they go on; later nodes are the verifier's own."""
        tree, width = self.tree, max(map(len, paths), default=0)
        tokens = np.zeros((len(paths), width), dtype=np.int64)
        origins = np.zeros_like(tokens)
        log_probs = np.zeros(tokens.shape)
        for index, path in enumerate(paths):
            tokens[index, : len(path)] = path
            walk = self.walk(index)
            nodes = walk[: len(path)]
            origins[index, : len(nodes)] = nodes
            origins[index, len(nodes) : len(path)] = tree.tokens.shape[1]
            log_probs[index, : len(nodes)] = self.node_log_probs[index, nodes]
            last = walk[-1] if len(walk) else ROOT
            log_probs[index, len(nodes) : len(path)] = self.choice_log_probs[index, last + 1]
        made = TokenTree.path(tree.rows, tokens, np.array([len(path) for path in paths]))
        total = np.where(made.real, np.cumsum(log_probs, axis=1), -np.inf)
        return replace(made, origins=origins, log_probs=total)

    def _extended(self) -> TokenTree:
        """All nodes with the verifier's probabilities, and its choice after each as a child."""
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
            tree.rows,
            np.concatenate((tree.tokens, self.choices), axis=1),
            np.concatenate((tree.parents, parents), axis=1),
            np.concatenate((tree.depths, depths + 1), axis=1),
            np.concatenate((path_log_probs[:, 1:], path_log_probs + self.choice_log_probs), axis=1),
            np.concatenate((np.broadcast_to(np.arange(width), real.shape), 0 * parents + width), 1),
            np.full(batch, 2 * width + 1),
        )
        return whole.keep(np.concatenate((real, added), axis=1))


class VerifyProcessor:
    def verify(
        self,
        model: PackedModel,
        state: ModelState,
        manager: StateManager,
        sampler: Sampler,
        tree: TokenTree,
        output_positions: Ints,
        prefill: tuple[Ints, Ints] | None = None,
        earlier: Ints | None = None,
        earlier_in_chunks: Ints | None = None,
        rescore: bool = False,
    ) -> Verdict:
        """One forward over the trees' rows and prefill chunks.

        Args:
            output_positions: [B], of the token after each root.
            prefill: rows and token counts of chunks that end before their last token.
            earlier: [B] tokens before each root whose logits are wanted too, as many as are fed.
            earlier_in_chunks: the same of the last tokens of each chunk of `prefill`.
            rescore: also find the log-probabilities of nodes and choices; else they are 0.

        Waits for the device once.
        """
        plan = _plan(state, manager, tree, prefill, earlier, earlier_in_chunks)
        result = run_pack(model, state, manager, plan, tree)
        contexts = tree_contexts(sampler, tree, output_positions, result.logits.device)
        places = _places(tree)
        if rescore:
            found = _judge(sampler, result.logits, contexts, tree, places)
        else:
            found = sampler.choose(result.logits, contexts)
        together = torch.cat([part.double() for part in found])
        values = together.cpu().numpy()  # the one wait; ids are exact in float64
        return _verdict(tree, places, values, rescore, result, _by_row(plan, result.earlier))

    def verify_by_rejection(
        self,
        model: PackedModel,
        state: ModelState,
        manager: StateManager,
        sampler: Sampler,
        tree: TokenTree,
        output_positions: Ints,
        proposals: Sequence[Proposal],
        level: int,
        prefill: tuple[Ints, Ints] | None = None,
        earlier: Ints | None = None,
        earlier_in_chunks: Ints | None = None,
    ) -> Verdict:
        """`verify` by Leviathan's rule; `tree` joins the proposals', which are of width 1.

        Args:
            level: of the verifier, the drafter's being 0; every level has noise of its own.

        Waits for the device a few times.
        """
        plan = _plan(state, manager, tree, prefill, earlier, earlier_in_chunks)
        result = run_pack(model, state, manager, plan, tree)
        contexts = tree_contexts(sampler, tree, output_positions, result.logits.device)
        places = _places(tree)
        paths = DraftedPaths(sampler, tree, places, contexts, result.logits, proposals)
        purpose = rejection_purpose(level)
        accepted = paths.accepted(purpose)
        emitted, finite_there = paths.emitted(accepted, purpose)
        finite, broken = np.ones(places.shape, np.bool_), np.zeros(places.shape, np.bool_)
        last = np.arange(len(tree.rows)), accepted  # a node is accepted by numbers only
        finite[last] = finite_there
        broken[places >= 0] = result.logits.amax(dim=1).isnan().cpu().numpy()
        walk = np.arange(tree.tokens.shape[1]) < accepted[:, None]
        choices = np.zeros(places.shape, dtype=np.int64)
        choices[:, :-1] = tree.tokens
        choices[last] = emitted
        nothing = np.zeros(places.shape)
        return Verdict(
            tree,
            walk,
            choices,
            np.where(finite, 0.0, -np.inf),  # where nothing could be drawn, nothing is handed on
            nothing[:, 1:],
            finite,
            broken,
            result.logits,
            places,
            result.fed,
            result.pack_tokens,
            _by_row(plan, result.earlier),
        )


def _judge(
    sampler: Sampler, logits: Tensor, contexts: Contexts, tree: TokenTree, places: Ints
) -> tuple[Tensor, ...]:
    """`Sampler.judge` of all nodes, row after row."""
    parents = np.take_along_axis(places, tree.parents + 1, axis=1)[tree.real]
    tokens = tree.tokens[tree.real]
    return sampler.judge(logits, contexts, parents, tokens)


def _verdict(
    tree: TokenTree,
    places: Ints,
    values: Floats,
    rescored: bool,
    result: PackResult,
    earlier: Mapping[int, Tensor],
) -> Verdict:
    """`values`: what was chosen at each place, its scores, and if `rescored` its
    log-probabilities and those of the nodes, one after the other."""
    here = places >= 0
    count, nodes = int(here.sum()), int(tree.sizes.sum())
    choices = np.zeros(places.shape, dtype=np.int64)
    choices[here] = values[:count].astype(np.int64)
    winning = values[count : 2 * count]
    choice_log_probs = np.zeros(places.shape)
    node_log_probs = np.zeros(tree.tokens.shape)
    if rescored:
        choice_log_probs[here] = np.minimum(values[2 * count : 3 * count], 0.0)
        node_log_probs[tree.real] = np.minimum(values[3 * count : 3 * count + nodes], 0.0)
    finite = np.ones(places.shape, dtype=np.bool_)
    finite[here] = np.isfinite(winning)
    broken = np.zeros(places.shape, dtype=np.bool_)
    broken[here] = np.isnan(winning)
    return Verdict(
        tree,
        tree.matching(choices),
        choices,
        choice_log_probs,
        node_log_probs,
        finite,
        broken,
        result.logits,
        places,
        result.fed,
        result.pack_tokens,
        earlier,
    )


def rejection_purpose(level: int) -> int:
    """Of the noise of a verifier by Leviathan's rule."""
    return level + 1  # 0 is the noise that all models share, 1 the drafter's own


def _by_row(plan: PackPlan, earlier: Tensor) -> dict[int, Tensor]:
    if plan.earlier is None:
        return {}
    asked = plan.earlier > 0
    counts = plan.earlier[asked].tolist()
    return dict(zip(plan.rows[asked].tolist(), torch.split(earlier, counts), strict=True))


def _plan(
    state: ModelState,
    manager: StateManager,
    tree: TokenTree,
    prefill: tuple[Ints, Ints] | None,
    earlier: Ints | None = None,
    earlier_in_chunks: Ints | None = None,
) -> PackPlan:
    rows, feed = tree.rows, lag(state, manager, tree.rows) + 1
    wanted = np.ones(len(rows), dtype=np.bool_)
    before = np.zeros_like(feed) if earlier is None else np.minimum(earlier, feed - 1)
    if prefill is not None and len(prefill[0]):
        of_chunks = np.zeros_like(prefill[0]) if earlier_in_chunks is None else earlier_in_chunks
        before = np.concatenate((before, np.minimum(of_chunks, prefill[1])))
        rows = np.concatenate((rows, prefill[0]))
        feed = np.concatenate((feed, prefill[1]))
        wanted = np.concatenate((wanted, np.zeros(len(prefill[0]), dtype=np.bool_)))
    order = np.argsort(rows)
    return PackPlan(
        rows[order], feed[order], wanted[order], before[order] if before.any() else None
    )


def _places(tree: TokenTree) -> Ints:
    """[B, W + 1] where, in row-after-row order, root and nodes stand; -1 for none."""
    counts = tree.sizes + 1
    starts = np.cumsum(counts) - counts
    place = np.arange(tree.tokens.shape[1] + 1)
    return np.where(place < counts[:, None], starts[:, None] + place, -1)
