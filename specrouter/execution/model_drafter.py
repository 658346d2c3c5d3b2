"""ModelDrafter: a model of the pool drafts, the target's quantised twin among them."""

import time
from dataclasses import replace

from processors import ActiveModel, DraftProcessor, DraftResult
from specrouter.cycle import CATCH_UP_TOKENS, Ints
from specrouter.execution.drafter import Drafter
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.runtime_parts import RuntimeParts


class EvictedError(Exception):
    """A model was evicted in the midst of the cycle. That is no fault of its own."""


class ModelDrafter(Drafter):
    def __init__(self, name: str, runtime: RuntimeParts) -> None:
        super().__init__(name, runtime)
        self._states = runtime.states
        self._draft = DraftProcessor(runtime.sampler)

    @property
    def is_open(self) -> bool:
        return self._states.is_open(self.name)

    def prepare(self) -> None:
        self._states.prepare(self.name)

    def lag(self, rows: Ints) -> Ints:
        return self._states.lag(self.name, rows)

    def draft(self, draft: GroupDraft) -> DraftResult:
        request = draft.request
        with self._states.stage(self.name, request.rows) as active:
            check_read(active, draft)
            started = time.perf_counter()
            result = self._draft.draft(active, request)
            places, steps = len(request.rows) * request.width, int(request.depths.max())
            self._runtime.record_stage("draft", places, started, times=steps)
            self._states.touch(active.state, request.rows, result.fed)
        # Places of the beam that hold no token are no nodes.
        tree = result.tree.select(request.depths * request.width, request.depths)
        return replace(result, tree=tree)


def check_read(active: ActiveModel, draft: GroupDraft) -> None:
    """The last tokens are read with the draft. Raises `EvictedError` where there are more."""
    behind = int(active.lag(draft.rows).max(initial=0))
    if behind > CATCH_UP_TOKENS:
        raise EvictedError
    draft.caught_up |= behind > 2
