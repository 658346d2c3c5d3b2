"""RowExecutor: what a decoding cycle asks of whatever runs its plans.

It is `specrouter.execution.Executor` over models, or a simulated machine. Requests, admission,
planning and learning are the same code over either, with times of a clock that comes in.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from specrouter.cycle import CyclePlan, CycleResult, Ints
from specrouter.request.spec import RequestSpec
from statemgr import RowKV, TokenChain


class Prefixes(Protocol):
    """See `CachedPrefixes`."""

    @property
    def are_kept(self) -> bool: ...

    def cached(self, request: RequestSpec, text: TokenChain) -> Mapping[str, int]: ...

    def inherited(self, row: int) -> int: ...

    def follow(self) -> Iterable[int]: ...

    def waits(self, left: Mapping[int, int]) -> Mapping[int, int]: ...


class HandOver(Protocol):
    """See `KVHandOver`."""

    def expected(self, request: RequestSpec) -> int: ...

    def read_since(self, row: int, start: int) -> RowKV | None: ...


class RowStates(Protocol):
    """See `ModelStates`."""

    def lag(self, name: str, rows: Ints) -> Ints: ...

    def slots_of(self, rows: Ints) -> Ints: ...

    def slots_for(self, tokens: int) -> int: ...


class RowExecutor(Protocol):
    """See `Executor`. Rows are numbers from 0 on."""

    @property
    def states(self) -> RowStates: ...

    @property
    def prefixes(self) -> Prefixes: ...

    @property
    def hand_over(self) -> HandOver: ...

    @property
    def rows(self) -> int: ...

    @property
    def free_tokens(self) -> int | None: ...

    def reserved_for(self, tokens: int) -> int: ...

    def allocate(self, request: RequestSpec) -> int | None: ...

    def open(self, row: int, request: RequestSpec) -> None: ...

    def prepare(self, row: int, request: RequestSpec) -> None: ...

    def close(self, row: int, keep: bool = False) -> None: ...

    def run(self, plan: CyclePlan) -> CycleResult: ...

    def unread(self, rows: Iterable[int]) -> dict[int, int]: ...

    def repeatable(self, rows: Ints) -> Ints: ...

    def is_open(self, model: str) -> bool: ...
