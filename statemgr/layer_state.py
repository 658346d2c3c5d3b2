"""Layer states: what the layers of a model keep of its rows.

Contract: there are two forms. `KVStore` keeps keys and values of every token in slots, which are
valid or not: any beginning of a row can be gone on from. `RecurrentStore` keeps a
state of each row behind a number of its tokens, and an entry of each token that may yet be rolled
back: a row can be gone on from where it ends, and where a copy of its state was kept.
`ModelState` keeps the account of tokens that both follow, and is all that others speak to. What
recurrent layers compute is their kinds' own (`modelpool.recurrent`).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
StateKey = tuple[int, str]  # a layer, and the name of one of its kinds
KeptState = Mapping[StateKey, Tensors]  # nobody writes to it
KeptStates = Mapping[int, KeptState]  # by number of tokens
KEPT_STATES = 4  # that a row which begins takes over, or keeps of its prompt on its way, at most


class StatePart(Protocol):
    """See `modelpool.recurrent`, as of the others."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype | None: ...


class RecurrentKind(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def parts(self) -> Sequence[StatePart]: ...
    def read(self, state: Tensors, token: Tensors) -> tuple[Tensor, Tensors]: ...
    def advance(self, state: Tensors, entry: Tensors) -> None: ...
    def scan(self, state: Tensors, tokens: Tensors) -> Tensor: ...


class RecurrentShape(Protocol):
    """What the store must know of a state that a recurrent layer keeps."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def kind(self) -> RecurrentKind: ...
