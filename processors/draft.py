"""DraftProcessor: drafts token trees with one model for many requests at once, without state.

It is a beam search of depth d and width w: at each depth the w best continuations of a row's beam
stay, scored by the model's perturbed logits, by which its verifier will also choose (AdaServe, 4.1;
`Sampler`). With `branching`, trees have a fixed form instead: so many children of each node
(SpecInfer). The loop never waits for the device: slots and positions of all its steps are known
beforehand, and tokens and their descent stay on the device until its end.
"""

import numpy as np
import torch
from torch import Tensor

from processors.beam import Beam
from processors.beam_slots import BeamSlots
from processors.contexts import Contexts
from processors.drafts import DraftRequest, DraftResult
from processors.errors import NonFiniteLogits
from processors.pack import ActiveModel, PackPlan, run_pack
from processors.sampler import Sampler
from processors.token_tree import Ints, TokenTree


class DraftProcessor:
    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def draft(self, active: ActiveModel, request: DraftRequest) -> DraftResult:
        """Draft trees of at least one level, after reading what the rows' state lacks.

        If a forward raises, its slots are scrubbed; the caller rolls back what came before.

        Raises:
            NonFiniteLogits: logits hold NaN, so the model cannot draft for these rows.
        """
        model, rows, depths = active.model, request.rows, request.depths
        rank, width = self._sampler.rank, request.width
        plan = PackPlan(rows, active.lag(rows) + 1, np.ones(len(rows), dtype=np.bool_))
        first = run_pack(active, plan, TokenTree.empty(rows)).logits
        beam, logits = Beam(rows, depths, width, request.branching), [first]
        no_paths = torch.zeros((len(rows), 0), dtype=torch.int64, device=first.device)
        everyone = np.arange(len(rows))
        beam.begin(*rank(first, _contexts(request, everyone, 0, no_paths), width))
        slots = BeamSlots(active.state, rows, active.manager.counts[rows], depths, width)
        try:
            for step in range(1, int(depths.max())):
                which = np.flatnonzero(depths > step)
                going_on = _index(which, len(rows), model.device)
                descent = slots.paths(beam, going_on)
                order = slots.order(beam, going_on, which, step)
                positions, view = slots.view(which, step, descent, order)
                at, everywhere = map(torch.from_numpy, (positions, np.arange(len(positions))))
                read = model.forward(beam.tokens(going_on), at, view, everywhere)
                logits.append(read.logits)
                paths = beam.paths(going_on)
                contexts = _contexts(request, np.repeat(which, width), step, paths)
                beam.grow(going_on, *rank(logits[-1], contexts, width))
            tree = beam.tree()
        except BaseException:
            slots.scrub()
            raise
        broken = np.isnan(tree.log_probs).any(axis=1)
        if broken.any():
            raise NonFiniteLogits(model.name, rows[broken])
        return DraftResult(tree, torch.cat(logits), _places(depths, width), slots.hold(tree))


def _index(which: Ints, rows: int, device: torch.device) -> Tensor:
    """Return the rows that continue, on the device; nothing is copied if all do."""
    if len(which) == rows:
        return torch.arange(rows, device=device)
    return torch.from_numpy(which).to(device, non_blocking=True)


def _contexts(request: DraftRequest, which: Ints, step: int, paths: Tensor) -> Contexts:
    """Return the places after `paths` [n, step], in the request's rows `which` [n]."""
    depths = np.full(len(which), step, dtype=np.int64)
    positions = request.output_positions[which] + step
    return Contexts(rows=request.rows[which], positions=positions, depths=depths, paths=paths)


def _places(depths: Ints, width: int) -> Ints:
    """Return where the logits after the root and each fed node are, [B, 1 + D * w], or -1."""
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
