"""Path attention: a token's keys in the order of positions, the end of them along its own path.

Contract: key j of a token has position j. It lies in the token's row: in slot j before the row's
tree, and from there on in the slots that the token's path through the tree names. A token therefore
reads the same keys in the same order whether it stands in a tree, in a chain or alone, and a kernel
that splits them at fixed positions gives it the same bits. `reference` says in torch what the
kernels compute; nothing here imports them.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_TAIL = 2**30  # a position that no token has
_PIECE = 2**22  # numbers of keys that the reference looks at together


class KeyPaths(Protocol):
    """Where the keys of T tokens lie: int32 tensors on one device.

    Key j of token t is in slot `firsts[t] + j` of the arena for j < tails[t], else in slot
    `firsts[t] + tails[t] + path[t, j - tails[t]]`, for j up to `positions[t]`.
    """

    @property
    def firsts(self) -> Tensor: ...  # [T] slots of the arena

    @property
    def positions(self) -> Tensor: ...  # [T]

    @property
    def tails(self) -> Tensor: ...  # [T] positions; NO_TAIL, or beyond all others, without a tree

    @property
    def path(self) -> Tensor: ...  # [T, P], P >= 1; without any tree it may be of any shape

    @property
    def longest(self) -> int: ...  # the most keys of a token, or more; known on the host


@dataclass(frozen=True, eq=False)
class Paths:
    """Implements `KeyPaths`."""

    firsts: Tensor
    positions: Tensor
    tails: Tensor
    path: Tensor
    longest: int


class PackPlaces(Protocol):
    """Where the T tokens of a pack and their keys stand, on the host; the paths of a tree may be
    on the device alone."""

    @property
    def numbers(self) -> NDArray[np.int32]:
        """[4, T] slots of the tokens in the arena, and what `KeyPaths` calls firsts, positions and
        tails."""

    @property
    def path(self) -> Tensor | None: ...  # [T, P] int32; None without any tree

    @property
    def longest(self) -> int: ...  # the most keys of a token, or more


@dataclass(frozen=True)
class PathSettings:
    """How a layer attends. `window`: of positions, the own one included."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def reference(
    query: Tensor, keys: Tensor, values: Tensor, paths: KeyPaths, settings: PathSettings
) -> Tensor:
    """Path attention in plain torch, in the inputs' precision.

    Args:
        query: [T, heads, head_dim].
        keys, values: [slots, kv_heads, head_dim], the arena of a layer.

    Returns:
        [T, heads, head_dim]
    """
    place = torch.arange(paths.longest, device=query.device)
    slots, seen = _slots(paths, place), _seen(paths, place, settings.window)
    piece = max(1, _PIECE // (paths.longest * keys.shape[1] * keys.shape[2]))
    parts = zip(
        torch.split(query, piece), torch.split(slots, piece), torch.split(seen, piece), strict=True
    )
    return torch.cat([_attended(*part, keys, values, settings) for part in parts])


def _attended(
    query: Tensor,  # [T, heads, head_dim]
    slots: Tensor,  # [T, L]
    seen: Tensor,
    keys: Tensor,
    values: Tensor,
    settings: PathSettings,
) -> Tensor:
    # What is not seen may hold no numbers: it is neither multiplied nor added.
    own_keys, own_values = (
        part[slots].masked_fill(~seen[..., None, None], 0) for part in (keys, values)
    )  # [T, L, kv_heads, head_dim]
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(tokens, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("tkgd,tlkd->tkgl", grouped, own_keys) * settings.scale
    if settings.softcap is not None:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("tkgl,tlkd->tkgd", weights, own_values).reshape(query.shape)


def _slots(paths: KeyPaths, place: Tensor) -> Tensor:
    """[T, L] arena slots of the keys; any where there is none."""
    tails, positions = paths.tails.long()[:, None], paths.positions.long()[:, None]
    on_path = (place >= tails) & (place <= positions)
    if bool(on_path.any()):
        step = (place - tails).clamp(0, paths.path.shape[1] - 1)
        walked = tails + paths.path.long().gather(1, step)
    else:
        walked = place.expand_as(on_path)
    slots = torch.where(on_path, walked, torch.minimum(place, positions))
    return paths.firsts.long()[:, None] + slots


def _seen(paths: KeyPaths, place: Tensor, window: int | None) -> Tensor:
    """[T, L] is there a key that the token attends to?"""
    positions = paths.positions.long()[:, None]
    seen = place <= positions
    return seen if window is None else seen & (place > positions - window)
