"""KVHandOver: what the target has read goes to another process, or comes from one.

Contract: a row whose keys and values do not come, or do not fit, reads its tokens itself: slower,
with the same text. Only the target's are handed over; drafters catch up as they do anyway.
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
    """Args: `fingerprint`: of what texts depend on; keys and values of another one do not fit."""

    def __init__(self, pool: ModelPool, manager: StateManager, fingerprint: str) -> None:
        self._target = pool.target
        self._manager = manager
        self._fingerprint = fingerprint

    def expected(self, request: RequestSpec) -> int:
        """Tokens that a request need not read, by what came with it; what does not fit is dropped.

        Who wants the log-probabilities of a prompt reads all of it.
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
        """A row begins with what came with its request."""
        state = self._manager.state(self._target)
        if request.kv is None or state is None or not self.expected(request):
            return
        committed, model = self._manager.committed(row), self._fingerprint
        added = sum(import_row(state, row, each, committed, model) for each in request.kv.take())
        self._manager.cache_counts.imported_tokens += added

    def read_since(self, row: int, start: int) -> RowKV | None:
        """What the target has read of a row from position `start` on; None: nothing."""
        state = self._manager.state(self._target)
        stop = 0 if state is None else int(state.lengths(np.array([row]))[0])
        if state is None or stop <= start:
            return None
        return export_row(state, row, start, stop, self._manager.committed(row), self._fingerprint)
