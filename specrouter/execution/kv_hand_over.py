"""The transfer of the target's keys and values to another process, or from one.

Contract: a row whose keys and values do not come, or do not fit, reads its tokens itself: slower,
with the same text. Only the target's are transferred; drafters catch up as they always do.
"""

import logging

import numpy as np

from modelpool import ModelPool
from specrouter.cycle import Ints
from specrouter.request.spec import RequestSpec
from statemgr import (
    KVMismatchError,
    ModelState,
    RowKV,
    StateManager,
    check_kv,
    export_row,
    import_row,
)

logger = logging.getLogger(__name__)


class KVHandOver:
    """Export and import of rows; keys and values with another `fingerprint` do not fit."""

    def __init__(self, pool: ModelPool, manager: StateManager, fingerprint: str) -> None:
        self._target = pool.target
        self._manager = manager
        self._fingerprint = fingerprint

    def expected(self, request: RequestSpec) -> int:
        """Return the tokens that a request need not read, because keys and values came with it.

        Parts that do not fit are dropped; all of them if the request asks for log-probabilities of
        its prompt, which has to be read whole.
        """
        state, kv = self._manager.state(self._target), request.kv
        if kv is None:
            return 0
        if state is None or request.params.prompt_logprobs is not None:
            kv.take()
        elif not kv.is_checked:
            kv.is_checked = True
            kv.parts = self._fitting(state, kv.parts, np.array(request.committed))
        return kv.tokens

    def _fitting(self, state: ModelState, parts: list[RowKV], committed: Ints) -> list[RowKV]:
        held = 0
        for number, part in enumerate(parts):
            try:
                check_kv(state, part, held, committed, self._fingerprint)
            except KVMismatchError as error:
                logger.warning("keys and values were handed over %s: they are read again", error)
                return parts[:number]
            held = part.stop
        while state.is_recurrent and parts and not len(parts[-1].state):
            parts = parts[:-1]
        return parts

    def take(self, row: int, request: RequestSpec) -> None:
        """Import the keys and values that came with a row's request."""
        state = self._manager.state(self._target)
        if request.kv is None or state is None or not self.expected(request):
            return
        committed, model = self._manager.committed(row), self._fingerprint
        added = sum(import_row(state, row, each, committed, model) for each in request.kv.take())
        self._manager.cache_counts.imported_tokens += added

    def read_since(self, row: int, start: int) -> RowKV | None:
        """Return keys and values of a row's read tokens from `start` on, or None without any."""
        state = self._manager.state(self._target)
        stop = 0 if state is None else int(state.lengths(np.array([row]))[0])
        if state is None or stop <= start:
            return None
        return export_row(state, row, start, stop, self._manager.committed(row), self._fingerprint)
