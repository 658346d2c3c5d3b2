"""Contexts: the places in requests' tokens after which a model is asked for a token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from processors.token_tree import Ints


@dataclass(frozen=True, eq=False, kw_only=True)
class Contexts:
    """n places. Each stands after its row's committed tokens and the tokens of its path.

    Rows, positions and depths are known on the host; the paths may be on the device alone.
    Drafters' places have no masks: what they draft is free. Those of `are_past` stand within the
    committed text instead, before tokens that are there already, and have no paths.
    """

    rows: Ints  # [n]
    positions: Ints  # [n] output position of the token that is chosen there
    depths: Ints  # [n] tokens of the path
    paths: Tensor | None = None  # [n, L]; of path i the first depths[i]. None: nobody needs them
    masks: Tensor | None = None  # [n, ceil(V / 8)] what grammars allow there, `grammar.Bits`
    are_past: bool = False

    def part(self, own: slice) -> "Contexts":
        """Consecutive places, not copied."""
        paths = None if self.paths is None else self.paths[own]
        masks = None if self.masks is None else self.masks[own]
        rows, positions, depths = self.rows[own], self.positions[own], self.depths[own]
        return Contexts(
            rows=rows,
            positions=positions,
            depths=depths,
            paths=paths,
            masks=masks,
            are_past=self.are_past,
        )

    def take(self, index: Ints) -> "Contexts":
        """Some of the places, in the order of `index`."""
        paths, masks = (
            None if part is None else part[torch.from_numpy(index).to(part.device)]
            for part in (self.paths, self.masks)
        )
        rows, positions, depths = self.rows[index], self.positions[index], self.depths[index]
        return Contexts(
            rows=rows,
            positions=positions,
            depths=depths,
            paths=paths,
            masks=masks,
            are_past=self.are_past,
        )
