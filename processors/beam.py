"""Beam: a beam search over many rows at once, on the device until its end.

At each depth the best continuations of a row's beam stay (AdaServe, 4.1), or as many children of
each node as `branching` says (SpecInfer). Only `tree` waits for the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from processors.token_tree import ROOT, Ints, TokenTree


class Beam:
    """Beams of B rows on the device, grown step by step; a finished row stays as it is."""

    def __init__(
        self, rows: Ints, depths: Ints, width: int, branching: Sequence[int] | None = None
    ) -> None:
        self._rows = rows
        self._depths = depths
        self._width = width
        self._branching = branching
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents, log-probs [B, w]
        self._lineage: Tensor  # [B, w, step] places of a node's path in each step
        self._paths: Tensor  # [B, w, step] their tokens

    def begin(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Set the first nodes, [B, w] each; fewer if the vocabulary is smaller than the beam."""
        if self._branching is not None:
            tokens, log_probs = tokens[:, : self._branching[0]], log_probs[:, : self._branching[0]]
        missing = self._width - tokens.shape[1]
        tokens = functional.pad(tokens, (0, missing))
        log_probs = functional.pad(log_probs, (0, missing), value=float("-inf"))
        self._steps.append((tokens, torch.full_like(tokens, ROOT), log_probs))
        self._lineage = _beam_index(tokens).unsqueeze(2)
        self._paths = tokens.unsqueeze(2)

    def grow(self, active: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """Add a step for rows `active` [A], from their children's ids and log-probs [A * w, w]."""
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
        paths = self._of(active, self._paths).gather(1, deep)
        lineage = torch.cat((lineage, _beam_index(token).unsqueeze(2)), dim=2)
        paths = torch.cat((paths, token.unsqueeze(2)), dim=2)
        self._lineage, self._paths = self._spread(active, lineage), self._spread(active, paths)

    def tokens(self, active: Tensor) -> Tensor:
        """Return the tokens of the last step, [A * w]."""
        return self._of(active, self._steps[-1][0]).reshape(-1)

    def paths(self, active: Tensor) -> Tensor:
        """Return the tokens down to each node of the last step, [A * w, step]."""
        return self._of(active, self._paths).flatten(0, 1)

    def parents(self, active: Tensor) -> Tensor:
        """Return the places of the last nodes' parents in the step before, [A, w]."""
        return self._of(active, self._steps[-1][1])

    def routes(self, active: Tensor) -> Tensor:
        """Return the speculative slots down to each last node, [A * w, step] int32."""
        lineage = self._of(active, self._lineage).flatten(0, 1)
        steps = torch.arange(lineage.shape[1], device=lineage.device)
        return (lineage + self._width * steps).to(torch.int32)

    def tree(self) -> TokenTree:
        """Return all nodes, on the host; this is a draft's only wait for the device."""
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
            rows=self._rows,
            tokens=np.where(real, found[0], 0),
            parents=np.where(real & (step > 0), found[1] + (step - 1) * self._width, ROOT),
            depths=np.where(real, step + 1, 0),
            log_probs=np.where(real, found[2].view(np.float64), -np.inf),
            origins=np.where(real, index, 0),
            sizes=sizes,
        )

    def _of(self, active: Tensor, values: Tensor) -> Tensor:
        """Select the active rows: [B, ...] to [A, ...]."""
        if len(active) == len(self._rows):
            return values
        return values.index_select(0, active)

    def _spread(self, active: Tensor, values: Tensor) -> Tensor:
        """Expand from active rows, [A, ...] to [B, ...], with zeros for finished rows."""
        if len(active) == len(self._rows):
            return values
        everyone = values.new_zeros((len(self._rows), *values.shape[1:]))
        return everyone.index_copy_(0, active, values)


def _beam_index(like: Tensor) -> Tensor:
    return torch.arange(like.shape[1], device=like.device).expand_as(like)
