"""BeamSlots: the slots of a drafter's state that hold the nodes of a growing beam."""

import numpy as np
from torch import Tensor

from modelpool.attention.kv_view import TreePaths
from processors.beam import Beam
from processors.pack import NO_SLOT, FedTree
from processors.token_tree import Ints, TokenTree
from statemgr import ForwardView, ModelState, TokenOrder


class BeamSlots:
    """Slots of the nodes that are fed back, all taken at once: `depths[i] - 1` levels of row i.

    A step's queries do not see the nodes of later steps, whose positions are larger.
    """

    def __init__(
        self, state: ModelState, rows: Ints, first_positions: Ints, depths: Ints, width: int
    ) -> None:
        """Take the slots; `first_positions`, [B], are those of the first level."""
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
        self._starts = np.full(len(state.ends), state.slots)  # other rows: beyond their slots
        self._starts[rows] = state.ends[rows] - counts

    def paths(self, beam: Beam, going_on: Tensor) -> TreePaths | None:
        """Return the ancestors of the last level for attention; None if positions suffice."""
        if self.width == 1:
            return None
        return TreePaths(self._starts, beam.routes(going_on))

    def order(self, beam: Beam, going_on: Tensor, which: Ints, step: int) -> TokenOrder | None:
        """Return what the nodes of a level follow, for recurrent layers; None without such layers.

        This waits for the device.
        """
        if not self._state.is_recurrent:
            return None
        if step == 1:  # the root, in the slot before the nodes'
            rows = self._rows[which]
            roots = rows * self._state.slots + self._starts[rows] - 1
            parents = np.repeat(roots[:, None], self.width, axis=1)
        else:
            place = beam.parents(going_on).cpu().numpy()
            parents = np.take_along_axis(self._slots[which, step - 2], place, axis=1)
        return TokenOrder(np.zeros_like(which), parents.reshape(-1))

    def view(
        self,
        which: Ints,
        step: int,
        paths: TreePaths | None,
        order: TokenOrder | None = None,
    ) -> tuple[Ints, ForwardView]:
        """Return positions [A * w] and view of a forward over a level, the first being step 1."""
        positions = np.repeat(self._first_positions[which] + step - 1, self.width)
        view = self._state.view(
            self._rows[which],
            np.full_like(which, self.width),
            positions,
            self._slots[which, step - 1].reshape(-1),
            paths,
            order,
        )
        return positions, view

    def hold(self, tree: TokenTree) -> FedTree:
        """Set the tokens in the state, now that they are known, and return the fed tree."""
        fed = FedTree(tree, np.full(tree.tokens.shape, NO_SLOT))
        fed.flat_slots[:, : self._slots[0].size] = self._slots.reshape(len(tree.rows), -1)
        taken = self._slots[self._slots != NO_SLOT]
        self._state.set_tokens(taken, tree.tokens[fed.flat_slots != NO_SLOT])
        # Impossible nodes are not drafts: unused places of a level repeat a token.
        fed.flat_slots[np.isneginf(tree.log_probs)] = NO_SLOT
        return fed

    def scrub(self) -> None:
        self._state.scrub(self._slots[self._slots != NO_SLOT])
