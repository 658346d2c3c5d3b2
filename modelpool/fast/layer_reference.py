"""Operations between the matrix products of a Llama-shaped layer, in plain torch.

Contract: `modelpool.fast.layer_kernels` computes the same in one launch each. The arguments of both
are defined here, and the kernels' types, so that a forward may use either.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from modelpool.attention.kv_view import AttentionLayer
from modelpool.attention.path import KeyPaths, filled

Arena = tuple[Tensor, Tensor]  # keys and values of a layer, each [slots, kv_heads, head_dim]
HeadNorms = tuple[Tensor, float]  # [heads + kv_heads, head_dim] weights of RMS norms, and their eps


@dataclass(frozen=True, eq=False)
class PackInputs:
    """All inputs of a forward over T tokens besides weights and arenas: int32, on the device."""

    tokens: Tensor  # [T]
    slots: Tensor  # [T] where keys and values are written
    paths: KeyPaths
    logit_index: Tensor  # [n] the tokens whose logits are wanted

    @property
    def positions(self) -> Tensor:
        """The tokens' positions, [T]."""
        return self.paths.positions


@dataclass(frozen=True)
class LayerKernels:
    """The functions that a forward calls between its matrix products."""

    rotate_and_write: Callable[[Tensor, PackInputs, Tensor, Arena, HeadNorms | None], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, KeyPaths, AttentionLayer], Tensor]
    gated: Callable[[Tensor], Tensor]


def rotate_and_write(
    qkv: Tensor, inputs: PackInputs, rotations: Tensor, arena: Arena, norms: HeadNorms | None
) -> Tensor:
    """Norm and rotate queries and keys, and write keys and values into a layer's arena.

    `qkv` is [rows, heads + 2 * kv_heads, head_dim]; rows after the T tokens are ignored.
    `rotations` is [positions, 2, head_dim], cosines and sines, the latter with the signs of a half
    turn. `norms` is for models that norm queries and keys head by head.

    Returns:
        [rows, heads, head_dim], the queries; rows without a token hold arbitrary numbers.
    """
    keys, values = arena
    rows, qkv = len(qkv), qkv[: len(inputs.tokens)]
    rotated, half = qkv.shape[1] - keys.shape[1], qkv.shape[2] // 2
    both = qkv[:, :rotated]
    if norms is not None:
        weight, eps = norms
        both = F.rms_norm(both, both.shape[-1:], None, eps) * weight
    turn = rotations.index_select(0, inputs.positions.long()).unsqueeze(2)  # [T, 2, 1, head_dim]
    both = both * turn[:, 0] + both.roll(half, -1) * turn[:, 1]
    heads = rotated - keys.shape[1]
    slots = inputs.slots.long()
    keys.index_copy_(0, slots, both[:, heads:])
    values.index_copy_(0, slots, qkv[:, rotated:])
    return filled(both[:, :heads], rows)


def gated(gate_up: Tensor) -> Tensor:
    """Map [rows, 2 * size] to [rows, size]: silu of the first half, times the second."""
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up
