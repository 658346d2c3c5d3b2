"""Rotation: how a layer rotates its queries and keys by their positions.

Contract: a model's own rotary embedding computes the angles. Their use differs: halves of a head
are rotated, or pairs of neighbours; all of a head, or its first numbers; products are rounded to
the model's dtype before they are added, or not. `candidates` are tried in turn by `model_shape`,
which compares bits.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from modelpool.fast.trigonometry import cosine, sine

_FIRST_POSITIONS = 2048  # of a table, before it grows
_MOST_KEPT = 2**24  # cosines of a rotation: for heads of 128 those of 131,072 positions

Table = tuple[Tensor, ...]  # cosines and signed sines, [T, 1, size] each; () without a rotation
Arithmetic = Literal["own", "wide", "float"]
Turn = Callable[..., Tensor]  # takes queries and keys [T, heads, head_dim] and a table


@dataclass(frozen=True)
class Rotation:
    """A form of rotary embedding.

    Attributes:
        pairs: each number is rotated with its neighbour; else halves with one another.
        repeated: with `pairs`, the first half of the embedding's angles are those of the pairs;
            else all of them are those of half of the numbers.
        arithmetic: `own`: products are rounded before they are added; `wide`: sums are, in the
            wider of both dtypes; `float`: queries and keys are converted to float32 before.
        size: number of a head's first numbers that are rotated.
        embedding: arguments of the rotary embedding besides positions, such as a kind of layer.
    """

    pairs: bool
    repeated: bool
    arithmetic: Arithmetic
    size: int
    embedding: tuple[Any, ...] = ()

    def table(self, cos: Tensor, sin: Tensor, positions: Tensor) -> Table:
        """Return the table for the embedding's output, [1, T, size], and positions [T].

        `sin` is changed in place.
        """
        cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
        half = self.size // 2
        if self.repeated and self.pairs:
            cos, sin = (one[..., :half].repeat_interleave(2, dim=-1) for one in (cos, sin))
        elif self.repeated:
            cos, sin = (torch.cat((one, one), dim=-1) for one in (cos, sin))
        signed = sin[..., ::2] if self.pairs else sin[..., :half]
        signed.neg_()
        return cos, sin

    def operator(self, head_dim: int, is_lean: bool = False) -> Turn:
        """Return the rotation with transformers' rounding; `is_lean`: in fewer operators."""
        multiply, half = _lean if is_lean else _ARITHMETIC[self.arithmetic], self.size // 2

        def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return multiply(x, x.roll(half, -1), cos, sin)

        def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            other = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
            return multiply(x, other, cos, sin)

        found = turn_pairs if self.pairs else turn
        return found if self.size == head_dim else _of_first(self.size, found)


@dataclass(frozen=True)
class TunedRotation(Rotation):
    """A rotation that also scales queries up with their position, as in Llama 4.

    Attributes:
        beta: rate of the growth.
        original: number of positions in each step.
        heads: number of query heads.
    """

    beta: float = 0.0
    original: int = 1
    heads: int = 0

    def table(self, cos: Tensor, sin: Tensor, positions: Tensor) -> Table:
        cos, sin = super().table(cos, sin, positions)
        factor = 1 + self.beta * torch.log(1 + torch.floor(positions / self.original))
        return cos, sin, factor.to(cos.dtype).view(-1, 1, 1).expand_as(cos)

    def operator(self, head_dim: int, is_lean: bool = False) -> Turn:
        turn, heads = super().operator(head_dim, is_lean), self.heads

        def tuned(x: Tensor, cos: Tensor, sin: Tensor, factor: Tensor) -> Tensor:
            x = turn(x, cos, sin)
            x[:, :heads].mul_(factor[..., :1])
            return x

        return tuned


def candidates(
    angles: int, embedding: tuple[Any, ...], ropes: Mapping[str, Any], heads: int
) -> Iterator[Rotation]:
    """Yield the possible rotations for an embedding that gave `angles` angles.

    `embedding` has its further arguments, `ropes` is the configuration's `rope_parameters`, and
    `heads` is the number of query heads.
    """
    for arithmetic in _ARITHMETIC:
        for pairs, repeated in itertools.product((False, True), repeat=2):
            size = 2 * angles if repeated and not pairs else angles
            one = Rotation(pairs, repeated, arithmetic, size, embedding)
            yield one
            beta = ropes.get("llama_4_scaling_beta")
            if beta is not None:
                original = ropes["original_max_position_embeddings"]
                yield TunedRotation(**vars(one), beta=beta, original=original, heads=heads)


def rotation_table(
    rotation: Rotation, rotary: Any, like: Tensor, positions: int, first: int = 0
) -> Tensor:
    """Return cosines and signed sines, [positions - first, 2, 1, size], for positions from `first`.

    They have the dtype and the device of `like`. Further parts of a rotation's table follow them.
    `rotary` is the model's rotary embedding.
    """
    return torch.stack(_angles(rotation, rotary, like, torch.arange(first, positions)), dim=1)


def angles_of(
    rotation: Rotation, rotary: Any, like: Tensor, positions: int
) -> Callable[[Tensor], Table]:
    """Return a function from positions [T] to angles, with a table unless it would be too large.

    The table grows with the positions that occur: all of Gemma 3's take a second and 134 MB.
    """
    if positions * rotation.size > _MOST_KEPT:
        return lambda index: _angles(rotation, rotary, like, index)
    grows = like.device.type == "cpu"  # elsewhere to look at positions would wait for the device
    first = min(positions, _FIRST_POSITIONS) if grows else positions
    table = rotation_table(rotation, rotary, like, first)

    def angles(index: Tensor) -> Table:
        nonlocal table
        needed = int(index.max()) + 1 if grows and index.numel() else 0
        if needed > len(table):
            more = min(positions, max(needed, 2 * len(table)))
            added = rotation_table(rotation, rotary, like, more, len(table))
            table = torch.cat((table, added))
        return table.index_select(0, index).unbind(1)

    return angles


class OwnFrequencies(TorchFunctionMode):
    """Mode in which models are made whose rotary frequencies are the same on every CPU.

    torch's vectorised powers have other bits on some CPUs. Here powers of a number are computed in
    float64, one by one, and rounded once.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.__rpow__ and not kwargs:
            exponents, base = args
            is_ours = exponents.dtype is torch.float32 and not exponents.is_meta
            if is_ours and isinstance(base, int | float):
                powers = [float(base) ** one for one in exponents.flatten().tolist()]
                return exponents.new_tensor(powers).view(exponents.shape)
        return function(*args, **(kwargs or {}))


class _OwnTrigonometry(TorchFunctionMode):
    """Mode in which cosines and sines have the same bits on every CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.cos, torch.Tensor.cos):
            return cosine(args[0])
        if function in (torch.sin, torch.Tensor.sin):
            return sine(args[0])
        return function(*args, **(kwargs or {}))


def _angles(rotation: Rotation, rotary: Any, like: Tensor, positions: Tensor) -> Table:
    index = positions.to(like.device)
    with _OwnTrigonometry():
        cos, sin = rotary(like, index.unsqueeze(0), *rotation.embedding)
    return rotation.table(cos.to(like.dtype), sin.to(like.dtype), index)


def _of_first(size: int, turn: Turn) -> Turn:
    """Rotate only the first numbers of a head."""
    return lambda x, *table: torch.cat((turn(x[..., :size], *table), x[..., size:]), dim=-1)


# `other` is a copy of the numbers that each number is rotated with.
def _own(x: Tensor, other: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).add_(other.mul_(sin))


def _wide(x: Tensor, other: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).add_(other * sin).to(x.dtype)


def _float(x: Tensor, other: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x.float() * cos).add_(other.float() * sin).to(x.dtype)


def _lean(x: Tensor, other: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).addcmul_(other, sin)


_ARITHMETIC: Mapping[Arithmetic, Turn] = {"own": _own, "wide": _wide, "float": _float}
