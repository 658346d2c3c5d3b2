"""TextDrafter: drafts without a model, from what followed the same tokens before.

`ngram` reads the request's own text; `suffix` also earlier outputs of its tenant, which are kept
when rows close. Both extend a draft as long as it is likely to be right.
"""

import time

from processors import DraftResult, NgramDraftProcessor
from specrouter.execution.drafter import Drafter, Quoted
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.runtime_parts import RuntimeParts
from specrouter.request.params import MAX_TREE_TOKENS
from specrouter.request.spec import RequestSpec
from statemgr import OutputStore, SuffixTable

_LEAD = 16  # tokens before an output that are kept with it, so that its beginning is found


class TextDrafter(Drafter):
    reach = MAX_TREE_TOKENS

    def __init__(self, name: str, runtime: RuntimeParts) -> None:
        super().__init__(name, runtime)
        self._texts = SuffixTable(runtime.pool.vocab_size, self.outputs)
        self._draft = NgramDraftProcessor()

    def open(self, row: int, request: RequestSpec) -> None:
        self._texts.open(row, len(request.token_ids), request.predicted, tenant_of(request))

    def close(self, row: int) -> None:
        self._texts.close(row)

    def draft(self, draft: GroupDraft) -> DraftResult:
        request, started = draft.request, time.perf_counter()
        noise = self._runtime.sampler.noise_at
        tree = self._draft.draft(self._texts, self._runtime.manager, noise, request)
        levels = max(int(request.depths.max(initial=1)), int(tree.depths.max(initial=0)))
        step_ms = (time.perf_counter() - started) * 1000 / levels
        places = len(request.rows) * request.width
        self._runtime.profiler.record_forward(self.name, places, 0.0, step_ms, levels)
        return DraftResult.without_logits(tree)

    def quote(self, row: int, position: int, most: int, least: float) -> list[Quoted]:
        text, noise = self._runtime.manager.committed(row), self._runtime.sampler.noise_at
        return self._draft.path(self._texts, text, noise, row, position, most, least)


class SuffixDrafter(TextDrafter):
    def __init__(self, name: str, runtime: RuntimeParts) -> None:
        self.outputs = OutputStore(runtime.settings.output_store_tokens)
        super().__init__(name, runtime)
        self._kept: dict[int, tuple[str, int]] = {}  # tenants of rows, and tokens kept already

    def open(self, row: int, request: RequestSpec) -> None:
        super().open(row, request)
        tenant = tenant_of(request)
        if tenant is not None:
            self._kept[row] = tenant, len(request.committed)

    def close(self, row: int) -> None:
        """Keep the row's new output, and `_LEAD` tokens before it, for its tenant."""
        super().close(row)
        tenant, kept = self._kept.pop(row, ("", None))
        if kept is None or self.outputs is None:
            return
        committed = self._runtime.manager.committed(row)
        if len(committed) > kept:
            self.outputs.keep(tenant, committed[max(0, kept - _LEAD) :].tolist())


def tenant_of(request: RequestSpec) -> str | None:
    """Return the tenant whose outputs a request may quote and adds to, or None.

    As for cached prefixes, requests without a salt are one tenant, and a service with keys gives
    each key a salt.
    """
    return (request.params.cache_salt or "") if request.reuses_outputs else None
