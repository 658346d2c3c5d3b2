"""Experts in int8 and int4, which replace those of a mixture of experts on the CPU.

Contract: a row has the same bits beside any other rows, for any experts that these chose: each
expert is multiplied by the rows that chose it (`Int8Weight`: exact sums), and the outputs for a row
are added in the order of the experts' numbers, in float32.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelpool.checkpoint.block_values import StoredBlocks
from modelpool.config import KeptWeights
from modelpool.fast.linear import is_hooked
from modelpool.fast.quantised import (
    QuantisedWeight,
    Stored,
    chained,
    give_back_freed,
    weight_of,
)

_MARKS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed")  # set by transformers


class QuantisedExperts(nn.Module):
    """Replacement of transformers' `experts`; `plain` keeps all but their weights."""

    def __init__(
        self,
        plain: Any,
        in_int4: bool,
        in_int8: Collection[str] = (),
        stored: Mapping[str, Stored] | None = None,
    ) -> None:
        """Quantise the weights of `plain` (see `are_experts`), and free the plain ones.

        `in_int8` names the weights that are not in 4 bits; `stored` has those that the checkpoint
        stores in blocks.
        """
        super().__init__()
        self.plain = plain
        self.hidden_parameters = 0
        self.roundings: list[tuple[KeptWeights, float]] = []
        self._gate = plain._apply_gate if plain.has_gate else plain.act_fn
        up, down = "gate_up_proj" if plain.has_gate else "up_proj", "down_proj"
        blocks = stored or {}
        self.up = self._taken(up, in_int4 and up not in in_int8, blocks.get(up))
        self.down = self._taken(down, in_int4 and down not in in_int8, blocks.get(down))

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Map [T, hidden_size] to the same shape.

        `experts` are the numbers [T, K] that each row chose; a number from the count of experts on
        means none.
        """
        total = torch.zeros(hidden.shape, dtype=torch.float32)
        chosen = experts.flatten().numpy()
        order = np.argsort(chosen, kind="stable")
        numbers, starts = np.unique(chosen[order], return_index=True)
        factors = weights.flatten().float().unsqueeze(1)
        for number, places in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
            if number >= len(self.up):
                break
            rows, at = torch.from_numpy(places // experts.shape[1]), torch.from_numpy(places)
            x = hidden.index_select(0, rows)
            gated = self._gate(self.up[number].multiply(x, torch.float32))
            y = self.down[number].multiply(gated, torch.float32)
            total.index_add_(0, rows, y.mul_(factors.index_select(0, at)))
        return total.to(hidden.dtype)

    def _taken(self, name: str, in_int4: bool, stored: Stored | None) -> Sequence[QuantisedWeight]:
        """Return the quantised weights, by expert.

        The plain weight is freed when the last one is quantised.
        """
        plain: Tensor = getattr(self.plain, name).detach()
        biases: Any = getattr(self.plain, f"{name}_bias") if self.plain.has_bias else None
        found = []
        for number, matrix in enumerate(plain):
            bias = None if biases is None else biases[number].detach()
            rows = matrix.t().contiguous() if self.plain.is_transposed else matrix
            blocks = stored if isinstance(stored, StoredBlocks) else None
            values = [None] if blocks is None else blocks.read(number)
            parts: Sequence[Tensor] = rows.chunk(len(values))
            if blocks is not None and rows.is_meta and None in values:
                parts = [part.to(rows.dtype) for part in blocks.plain(number)]
            biased = [None] * len(parts) if bias is None else bias.chunk(len(parts))
            made = [weight_of(*each, in_int4) for each in zip(parts, values, biased, strict=True)]
            found.append(chained([weight for weight, _ in made]))
            self.roundings += [rounding for _, rounding in made if rounding is not None]
        self.hidden_parameters += plain.numel()
        self.plain.register_parameter(name, None)
        return found


def are_experts(module: Any) -> bool:
    """Return whether a module is experts on the CPU that can be quantised."""
    return can_quantise(module) and module.down_proj.device.type in ("cpu", "meta")


def can_quantise(module: Any) -> bool:
    """Return whether a module has the marks of transformers' experts, and no hooks."""
    if not all(hasattr(module, mark) for mark in _MARKS) or is_hooked(module):
        return False
    if len(inspect.signature(module.forward).parameters) != 3:
        return False
    name = "gate_up_proj" if module.has_gate else "up_proj"
    weights = [getattr(module, each, None) for each in (name, "down_proj")]
    return not module.has_post_expert_norm and all(
        isinstance(one, nn.Parameter) and one.dim() == 3 for one in weights
    )


def quantise_experts(
    model: nn.Module,
    in_int4: bool,
    in_int8: Collection[str] = (),
    stored: Mapping[str, Stored] | None = None,
) -> int:
    """Replace the experts of `model` in place; return the number of modules replaced.

    `in_int8` names the weights that are not in 4 bits; `stored` has those in blocks, by name.
    """
    found = 0
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if are_experts(child):
                prefix = f"{path}.{name}." if path else f"{name}."
                wide = {one.removeprefix(prefix) for one in in_int8}
                own = {key.removeprefix(prefix): one for key, one in (stored or {}).items()}
                setattr(parent, name, QuantisedExperts(child, in_int4, wide, own))
                give_back_freed()
                found += 1
    return found
