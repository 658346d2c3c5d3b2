"""DraftProcessor: one model proposes token trees for many requests at once. Stateless.

Beam search of depth d and width w: at each depth a row's w best continuations of its beam stay,
scored by the model's perturbed logits, which is how its verifier will choose (AdaServe, 4.1;
`Sampler`). With `branching`, trees have a fixed form instead: so many children of each node
(SpecInfer). The loop never waits for the device: slots and positions of all its steps are known
beforehand, tokens and their descent stay on the device until its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from modelpool.packed_model import PackedModel
from processors.contexts import Contexts
from processors.errors import NonFiniteLogits
from processors.pack import NO_SLOT, FedTree, PackPlan, PackResult, lag, run_pack
from processors.proposal import Proposal
from processors.sampler import Sampler
from processors.token_tree import ROOT, TokenTree
from statemgr import ForwardView, ModelState, StateManager, TreeMask

Ints = NDArray[np.int64]


class DraftProcessor:
    def draft(
        self,
        model: PackedModel,
        state: ModelState,
        manager: StateManager,
        sampler: Sampler,
        rows: Ints,
        output_positions: Ints,
        depths: Ints,
        width: int,
        purpose: int = 0,
        branching: Sequence[int] | None = None,
    ) -> Proposal:
        """Drafts trees of `depths[i]` levels, at least one, with `width` nodes on each.

        Args:
            rows: [B] ascending; what their state lacks is fed first.
            output_positions: [B], of the token after each row's root.
            purpose: of the noise (`Sampler.scores`).
            branching: children of every node by depth, as many as there are levels; `width` is
                their product. Else a level's best `width` nodes stay, whosever children they are.

        If a forward raises, its slots are scrubbed; the caller rolls back what went before.

        Raises:
            NonFiniteLogits: the model is of no use for these rows.
        """
        first = _begin(model, state, manager, rows).logits
        text = _Text(rows, output_positions)
        beam, logits = _Beam(rows, depths, width, branching), [first]
        everyone = text.contexts(np.arange(len(rows)), 0, _no_texts(first))
        beam.begin(*sampler.rank(first, everyone, width, purpose))
        slots = _BeamSlots(state, rows, manager.counts[rows], depths, width)
        try:
            for step in range(1, int(depths.max())):
                which = np.flatnonzero(depths > step)
                active = torch.from_numpy(which).to(model.device, non_blocking=True)
                logits.append(_feed(model, beam, slots, which, active, step))
                contexts = text.contexts(np.repeat(which, width), step, beam.texts(active))
                beam.grow(active, *sampler.rank(logits[-1], contexts, width, purpose))
            tree = beam.tree()
        except BaseException:
            slots.scrub()
            raise
        broken = np.isnan(tree.log_probs).any(axis=1)
        if broken.any():
            raise NonFiniteLogits(model.name, rows[broken])
        places = _places(depths, width)
        return Proposal(tree, torch.cat(logits), places, slots.hold(tree))


def _begin(model: PackedModel, state: ModelState, manager: StateManager, rows: Ints) -> PackResult:
    """Feeds what the rows lack."""
    behind = lag(state, manager, rows) + 1
    plan = PackPlan(rows, behind, np.ones(len(rows), dtype=np.bool_))
    return run_pack(model, state, manager, plan, TokenTree.empty(rows))


def _feed(
    model: PackedModel, beam: "_Beam", slots: "_BeamSlots", which: Ints, active: Tensor, step: int
) -> Tensor:
    """[A * w, V] after the nodes of the last level; `active` is `which`, on the device."""
    visible = None if slots.width == 1 else beam.visible(active)
    positions, view = slots.view(which, step, visible)
    at = torch.from_numpy(positions).to(model.device, non_blocking=True)
    everywhere = torch.arange(len(positions), device=model.device)
    return model.forward(beam.tokens(active), at, view, everywhere)


class _BeamSlots:
    """The slots of the nodes that are fed back, all taken now: `depths[i] - 1` levels of a row.

    A step's queries do not see those of later steps: their positions are larger.
    """

    def __init__(
        self, state: ModelState, rows: Ints, first_positions: Ints, depths: Ints, width: int
    ) -> None:
        """`first_positions`: [B] of the first level."""
        self.width = width
        self._state = state
        self._rows = rows
        self._first_positions = first_positions
        steps = np.arange(int(depths.max()) - 1)
        shape = (len(rows), len(steps), width)
        real = np.broadcast_to((steps < depths[:, None] - 1)[:, :, None], shape)
        positions = np.broadcast_to((first_positions[:, None] + steps)[:, :, None], shape)
        counts, unknown = (depths - 1) * width, np.full(int(real.sum()), -1)
        self._slots = np.full(shape, NO_SLOT)
        self._slots[real] = state.append(rows, counts, unknown, positions[real])
        self._starts = np.full(len(state.ends), state.slots)  # beyond other rows
        self._starts[rows] = state.ends[rows] - counts

    def view(self, which: Ints, step: int, visible: Tensor | None) -> tuple[Ints, ForwardView]:
        """Positions [A * w] and view of a forward over a level, the first being step 1.

        `visible`: [A * w, E] which of the slots each node descends from; None: positions say so.
        """
        positions = np.repeat(self._first_positions[which] + step - 1, self.width)
        view = self._state.view(
            self._rows[which],
            np.full_like(which, self.width),
            positions,
            self._slots[which, step - 1].reshape(-1),
            None if visible is None else TreeMask(self._starts, visible),
        )
        return positions, view

    def hold(self, tree: TokenTree) -> FedTree:
        """Tells the state the tokens, now that they are known."""
        fed = FedTree(tree, np.full(tree.tokens.shape, NO_SLOT))
        fed.flat_slots[:, : self._slots[0].size] = self._slots.reshape(len(tree.rows), -1)
        taken = self._slots[self._slots != NO_SLOT]
        self._state.set_tokens(taken, tree.tokens[fed.flat_slots != NO_SLOT])
        # Impossible nodes are no text: of places that a level lacks several have the same token.
        fed.flat_slots[np.isneginf(tree.log_probs)] = NO_SLOT
        return fed

    def scrub(self) -> None:
        self._state.scrub(self._slots[self._slots != NO_SLOT])


def _no_texts(logits: Tensor) -> Tensor:
    """[n, 0]"""
    return torch.zeros((len(logits), 0), dtype=torch.int64, device=logits.device)


@dataclass(frozen=True, eq=False)
class _Text:
    """What stands before the tokens of a beam: the rows' outputs."""

    rows: Ints
    output_positions: Ints  # [B], of the token after each row's root

    def contexts(self, which: Ints, step: int, texts: Tensor) -> Contexts:
        """After `texts` [n, step], which follow the outputs of the rows `which` [n]."""
        return Contexts(
            self.rows[which],
            self.output_positions[which] + step,
            np.full(len(which), step, dtype=np.int64),
            texts,
        )


class _Beam:
    """The beams of B rows on the device, step by step; a row that is done stays as it is."""

    def __init__(
        self, rows: Ints, depths: Ints, width: int, branching: Sequence[int] | None = None
    ) -> None:
        self._rows = rows
        self._depths = depths
        self._width = width
        self._branching = branching
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents, log-probs [B, w]
        self._lineage: Tensor  # [B, w, step] each node's ancestors, and itself, in their steps
        self._texts: Tensor  # [B, w, step] their tokens

    def begin(self, tokens: Tensor, log_probs: Tensor) -> None:
        """The first nodes, [B, w] each; fewer where the vocabulary is smaller than the beam."""
        if self._branching is not None:
            tokens, log_probs = tokens[:, : self._branching[0]], log_probs[:, : self._branching[0]]
        missing = self._width - tokens.shape[1]
        tokens = functional.pad(tokens, (0, missing))
        log_probs = functional.pad(log_probs, (0, missing), value=float("-inf"))
        self._steps.append((tokens, torch.full_like(tokens, ROOT), log_probs))
        self._lineage = _beam_index(tokens).unsqueeze(2)
        self._texts = tokens.unsqueeze(2)

    def grow(self, active: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """One step down for rows `active` [A]: their children's ids and log-probs [A * w, w]."""
        batch, width = len(active), self._width
        before = self._of(active, self._steps[-1][2])
        total = before.unsqueeze(2) + log_probs.view(batch, width, -1)
        if self._branching is not None:  # ranks come best first
            children = self._branching[len(self._steps)]
            total[:, :, children:] = float("-inf")
        best, place = total.reshape(batch, -1).topk(width, dim=1)
        parent = place // total.shape[2]
        token = tokens.view(batch, -1).gather(1, place)
        self._steps.append(tuple(self._spread(active, v) for v in (token, parent, best)))  # type: ignore[arg-type]
        deep = parent.unsqueeze(2).expand(-1, -1, self._lineage.shape[2])
        lineage = self._of(active, self._lineage).gather(1, deep)
        texts = self._of(active, self._texts).gather(1, deep)
        lineage = torch.cat((lineage, _beam_index(token).unsqueeze(2)), dim=2)
        texts = torch.cat((texts, token.unsqueeze(2)), dim=2)
        self._lineage, self._texts = self._spread(active, lineage), self._spread(active, texts)

    def tokens(self, active: Tensor) -> Tensor:
        """[A * w] of the last step."""
        return self._of(active, self._steps[-1][0]).reshape(-1)

    def texts(self, active: Tensor) -> Tensor:
        """[A * w, step] the tokens down to each node of the last step."""
        return self._of(active, self._texts).flatten(0, 1)

    def visible(self, active: Tensor) -> Tensor:
        """[A * w, E]: which speculative slots each node of the last step descends from."""
        lineage = self._of(active, self._lineage).flatten(0, 1)
        steps = lineage.shape[1]
        slots = lineage + self._width * torch.arange(steps, device=lineage.device)
        size = max(1, (int(self._depths.max()) - 1) * self._width)
        seen = torch.zeros((len(slots), size), dtype=torch.bool, device=lineage.device)
        return seen.scatter_(1, slots, True)

    def tree(self) -> TokenTree:
        """All nodes, on the host: the one wait of a draft."""
        tokens, parents, log_probs = (
            torch.stack(values, dim=1).flatten(1) for values in zip(*self._steps, strict=True)
        )
        bits = log_probs.clamp_(max=0.0).view(torch.int64)
        found = torch.stack((tokens, parents, bits)).cpu().numpy()
        count = len(self._steps) * self._width
        index = np.broadcast_to(np.arange(count), (len(self._rows), count))
        sizes = self._depths * self._width
        real = index < sizes[:, None]
        step = index // self._width
        return TokenTree(
            self._rows,
            np.where(real, found[0], 0),
            np.where(real & (step > 0), found[1] + (step - 1) * self._width, ROOT),
            np.where(real, step + 1, 0),
            np.where(real, found[2].view(np.float64), -np.inf),
            np.where(real, index, 0),
            sizes,
        )

    def _of(self, active: Tensor, values: Tensor) -> Tensor:
        """[B, ...] -> [A, ...]"""
        if len(active) == len(self._rows):
            return values
        return values.index_select(0, active)

    def _spread(self, active: Tensor, values: Tensor) -> Tensor:
        """[A, ...] -> [B, ...], zeros where a row is done."""
        if len(active) == len(self._rows):
            return values
        everyone = values.new_zeros((len(self._rows), *values.shape[1:]))
        return everyone.index_copy_(0, active, values)


def _beam_index(like: Tensor) -> Tensor:
    return torch.arange(like.shape[1], device=like.device).expand_as(like)


def _places(depths: Ints, width: int) -> Ints:
    """[B, 1 + D * w]: where the logits after the root and each fed node stand, -1 for none."""
    batch, deepest = len(depths), int(depths.max())
    places = np.full((batch, 1 + deepest * width), -1)
    places[:, 0] = np.arange(batch)
    start = batch
    for step in range(1, deepest):
        active = np.flatnonzero(depths > step)
        block = start + np.arange(len(active) * width).reshape(-1, width)
        places[active, 1 + (step - 1) * width : 1 + step * width] = block
        start += block.size
    return places
