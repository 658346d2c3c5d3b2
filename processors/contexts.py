"""Contexts: places in requests' tokens after which a model is asked for a token."""

from dataclasses import dataclass

from torch import Tensor

from processors.logits import on_device
from processors.token_tree import Ints


@dataclass(frozen=True, eq=False, kw_only=True)
class Contexts:
    """The n places at which tokens are chosen.

    Each place follows its row's committed tokens and the tokens of its path. Rows, positions and
    depths are known on the host; the paths may be on the device alone. Places of drafters have no
    masks, because grammars do not restrict drafts. With `are_past`, places are within the committed
    text instead, before tokens that exist already, and have no paths.
    """

    rows: Ints  # [n]
    positions: Ints  # [n] output position of the token that is chosen there
    depths: Ints  # [n] tokens of the path
    paths: Tensor | None = None  # [n, L]; path i has depths[i] tokens; None: not needed
    masks: Tensor | None = None  # [n, ceil(V / 8)] what grammars allow there, `grammar.Bits`
    are_past: bool = False

    def take(self, own: slice | Ints) -> "Contexts":
        """Return some of the places: a slice, which is not copied, or indices in their order."""

        def taken(part: Tensor | None) -> Tensor | None:
            if part is None:
                return None
            return part[own if isinstance(own, slice) else on_device(own, part.device)]

        return Contexts(
            rows=self.rows[own],
            positions=self.positions[own],
            depths=self.depths[own],
            paths=taken(self.paths),
            masks=taken(self.masks),
            are_past=self.are_past,
        )
