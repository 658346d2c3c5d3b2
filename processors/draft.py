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

_UNKNOWN = np.int64(-1)  # no token: what the device knows and the host does not yet


@dataclass(frozen=True, eq=False)
class DraftResult:
    tree: TokenTree
    logits: tuple[Tensor, ...]  # per depth [B, V], for similarities
    flat_slots: Ints  # [B, depth - 1] of the nodes that were fed back


class DraftProcessor:
    def draft(
        self,
        model: PackedModel,
        state: ModelState,
        manager: StateManager,
        sampler: Sampler,
        rows: Ints,
        output_positions: Ints,
        depth: int,
    ) -> DraftResult:
        """Drafts `depth` tokens for each row.

        Args:
            rows: [B] ascending; what their state lacks is fed first.
            output_positions: [B], of each row's first drafted token.
        """
        count = len(rows)
        behind = lag(state, manager, rows) + 1
        nothing = np.zeros(count, dtype=np.int64)
        plan = PackPlan(rows, behind, nothing, np.ones(count, dtype=np.bool_))
        logits = [run_pack(model, state, manager, plan).logits]
        tokens = [sampler.choose(logits[0], rows, output_positions)]
        slots = self._reserve(state, manager, rows, depth - 1)
        try:
            for step in range(1, depth):
                positions = manager.counts[rows] + step - 1
                view = state.view(rows, np.ones_like(rows), positions, slots[:, step - 1].copy())
                index = torch.arange(count, device=model.device)
                at = torch.from_numpy(positions).to(model.device, non_blocking=True)
                logits.append(model.forward(tokens[-1], at, view, index))
                tokens.append(sampler.choose(logits[-1], rows, output_positions + step))
        except BaseException:
            state.scrub(slots.reshape(-1))
            raise
        tree = TokenTree(rows, torch.stack(tokens, dim=1), np.full(count, depth))
        return DraftResult(tree, tuple(logits), slots)

    def _reserve(self, state: ModelState, manager: StateManager, rows: Ints, steps: int) -> Ints:
        """Slots [B, steps] for the nodes fed back, all taken now.

        A step's queries do not see those of later steps: their positions are larger.
        """
        counts = np.full(len(rows), steps)
        positions = manager.counts[rows][:, None] + np.arange(steps)
        unknown = np.full(len(rows) * steps, _UNKNOWN)
        flat = state.append(rows, counts, unknown, positions.reshape(-1))
        return flat.reshape(len(rows), steps)
