"""What stands between the matrix products of a Llama-shaped layer, in plain torch.

Contract: `modelpool.fast.layer_kernels` computes the same in one launch each. What both take is
here, and the kernels' types, so that a forward may be made of either.
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
    """All that a forward over T tokens reads beside weights and arenas: int32, on the device."""

    tokens: Tensor  # [T]
    slots: Tensor  # [T] where keys and values go
    paths: KeyPaths
    logit_index: Tensor  # [n] the tokens whose logits are wanted

    @property
    def positions(self) -> Tensor:
        """[T]"""
        return self.paths.positions


@dataclass(frozen=True)
class LayerKernels:
    """What a forward calls between its matrix products."""

    rotate_and_write: Callable[[Tensor, PackInputs, Tensor, Arena, HeadNorms | None], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, KeyPaths, AttentionLayer], Tensor]
    gated: Callable[[Tensor], Tensor]


def rotate_and_write(
    qkv: Tensor, inputs: PackInputs, rotations: Tensor, arena: Arena, norms: HeadNorms | None
) -> Tensor:
    """Norms and rotates queries and keys, writes keys and values into a layer's arena.

    Args:
        qkv: [rows, heads + 2 * kv_heads, head_dim], of the T tokens and of nothing behind them.
        rotations: [positions, 2, head_dim] cosines and sines, these with the signs of a half turn.
        norms: of models that norm queries and keys head by head.

    Returns:
        [rows, heads, head_dim], the queries; of any numbers where no token is.
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
    """[rows, 2 * size] to [rows, size]: silu of the first half, times the second."""
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up
