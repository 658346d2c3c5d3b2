"""DraftProcessor: one model proposes the next tokens of many requests. Stateless.

The loop over the depth never waits for the device: slots, positions and masks of all its steps
are known beforehand, tokens stay on the device, and the host learns them with the verifier's
choices.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelpool.packed_model import PackedModel
from processors.pack import PackPlan, lag, run_pack
from processors.sampler import Sampler
from processors.token_tree import TokenTree
from statemgr import ModelState, StateManager

Ints = NDArray[np.int64]

_UNKNOWN = np.int64(-1)  # no token, which the device knows and the host not yet; no slot


@dataclass(frozen=True, eq=False)
class DraftResult:
    tree: TokenTree
    logits: tuple[Tensor, ...]  # per depth [A, V], of the rows that draft so deep
    places: tuple[Ints, ...]  # per depth [B], where in the logits a row stands
    flat_slots: Ints  # [B, depth - 1] of the nodes that were fed back; _UNKNOWN beyond a row's


class DraftProcessor:
    def draft(
        self,
        model: PackedModel,
        state: ModelState,
        manager: StateManager,
        sampler: Sampler,
        rows: Ints,
        output_positions: Ints,
        sizes: Ints,
    ) -> DraftResult:
        """Drafts `sizes[i]` tokens, at least one, for each row.

        Args:
            rows: [B] ascending; what their state lacks is fed first.
            output_positions: [B], of each row's first drafted token.

        If a forward raises, its slots are scrubbed; the caller rolls back what went before.
        """
        behind = lag(state, manager, rows) + 1
        plan = PackPlan(rows, behind, np.zeros_like(rows), np.ones(len(rows), dtype=np.bool_))
        logits = [run_pack(model, state, manager, plan).logits]
        places = [np.arange(len(rows))]
        tokens = [sampler.choose(logits[0], rows, output_positions)]
        slots = self._reserve(state, manager, rows, sizes - 1)
        try:
            for step in range(1, int(sizes.max())):
                active = np.flatnonzero(sizes > step)
                index = torch.from_numpy(active).to(model.device, non_blocking=True)
                who, positions = rows[active], manager.counts[rows[active]] + step - 1
                view = state.view(who, np.ones_like(who), positions, slots[active, step - 1])
                fed = tokens[-1].index_select(0, index)
                at = torch.from_numpy(positions).to(model.device, non_blocking=True)
                everywhere = torch.arange(len(active), device=model.device)
                logits.append(model.forward(fed, at, view, everywhere))
                places.append(np.cumsum(sizes > step) - 1)
                chosen = sampler.choose(logits[-1], who, output_positions[active] + step)
                tokens.append(tokens[-1].index_copy(0, index, chosen))
        except BaseException:
            state.scrub(slots[slots != _UNKNOWN])
            raise
        tree = TokenTree(rows, torch.stack(tokens, dim=1), sizes)
        return DraftResult(tree, tuple(logits), tuple(places), slots)

    def _reserve(self, state: ModelState, manager: StateManager, rows: Ints, counts: Ints) -> Ints:
        """Slots [B, max(counts)] for the nodes fed back, all taken now.

        A step's queries do not see those of later steps: their positions are larger.
        """
        steps = np.arange(int(counts.max()))
        real = steps < counts[:, None]
        positions = (manager.counts[rows][:, None] + steps)[real]
        slots = np.full(real.shape, _UNKNOWN)
        slots[real] = state.append(rows, counts, np.full(len(positions), _UNKNOWN), positions)
        return slots
