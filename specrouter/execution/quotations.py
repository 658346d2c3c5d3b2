"""Quotations: drafts without a model, by themselves and in the place of a chain's.

Whatever a group's chain is, texts are looked up too. A row whose quotation promises more accepted
tokens than the chain was planned for, and at least one, by what quotations as probable as this one
have turned out to be worth, takes that as its draft: the models need not draft for it.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from modelpool.config import SUFFIX
from processors import DraftRequest, DraftResult, NgramDraftProcessor, TokenTree
from specrouter.cycle import ChainGroup, DraftShape, Floats, Ints
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.runtime import Runtime
from specrouter.request.params import MAX_TREE_TOKENS

AcceptProb = Callable[[GroupDraft, TokenTree], Floats]  # [B, W], see `AcceptanceFeedback`


class Quotations:
    def __init__(self, runtime: Runtime, accept_prob: AcceptProb) -> None:
        self._runtime = runtime
        self._rows = runtime.rows
        self._accept_prob = accept_prob
        self._draft = NgramDraftProcessor()
        self._is_long = runtime.pool.text_source == SUFFIX

    def reach(self, group: ChainGroup, limits: Ints) -> Ints | None:
        """[B] levels down to which quotations of a group may go on, of rows that may go so far;
        None: as far as its shape."""
        if group.quotes is None or not self._is_long:
            return None
        return np.minimum(MAX_TREE_TOKENS, limits)

    def look_up(self, name: str, request: DraftRequest) -> TokenTree:
        """What a member without weights drafts as one of a chain's; its time is told."""
        runtime, started = self._runtime, time.perf_counter()
        tree = self._found(request)
        levels = max(int(request.depths.max(initial=1)), int(tree.depths.max(initial=0)))
        step_ms = (time.perf_counter() - started) * 1000 / levels
        places = len(request.rows) * request.width
        runtime.profiler.record_forward(name, places, 0.0, step_ms, levels)
        return tree

    def _found(self, request: DraftRequest) -> TokenTree:
        runtime = self._runtime
        noise = runtime.rule.noise_lookup(runtime.sampler)
        return self._draft.draft(self._rows.texts, runtime.manager, noise, request)

    def instead(self, group: ChainGroup) -> tuple[list[GroupDraft], ChainGroup]:
        """The draft of the rows that quote, if there are any, and the group without them."""
        quoted: GroupDraft | None = None
        with self._runtime.faults.part("drafting"):
            quoted = self._better(group)
        if quoted is None:
            return [], group
        return [quoted], replace(group, rows=np.setdiff1d(group.rows, quoted.rows))

    def _better(self, group: ChainGroup) -> GroupDraft | None:
        name, planned = group.quotes, group.predicted
        if name is None or name in group.chain or planned is None or not self._is_long:
            return None
        least = max(1.0, planned.tokens - 1.0)  # accepted tokens that are worth another draft
        limits = self._rows.remaining(group.rows) - 1  # a row's last token is the target's own
        own = replace(
            group,
            chain=(name, group.chain[-1]),
            shape=DraftShape(1),
            rows=group.rows[limits > 0],
            branching=None,
            predicted=None,
        )
        draft = self._drafted(name, own, limits[limits > 0])
        assert draft.result is not None, "it was drafted"
        tree = draft.result.tree
        # Mostly nothing is quoted, and no tree promises more tokens than it has nodes: what it
        # promises is asked of the others only.
        if not (tree.sizes >= least).any():
            return None
        promised = self._accept_prob(draft, tree).sum(axis=1)
        chosen = own.rows[promised >= least]
        if not len(chosen):
            return None
        draft.group = replace(own, rows=chosen)
        draft.request = _of_rows(draft.request, chosen)
        draft.sampled = self._rows.sampled(chosen)
        draft.result = draft.result.of_rows(chosen)
        return draft

    def _drafted(self, name: str, group: ChainGroup, limits: Ints) -> GroupDraft:
        runtime, rows, nobody = self._runtime, group.rows, group.rows[:0]
        request = DraftRequest(
            rows=rows,
            output_positions=self._rows.output_positions(rows),
            depths=np.ones_like(rows),
            reach=self.reach(group, limits),
        )
        # Its time is the cycle's: what it takes hangs on what is found, so beside forwards it would
        # hide how slow the machine is just now.
        tree = runtime.rule.legal(self._found(request), runtime.sampler.grammars)
        draft = GroupDraft(
            group=group,
            request=request,
            sampled=self._rows.sampled(rows),
            cut_rows=nobody,
            behind_rows=nobody,
        )
        draft.result, draft.is_quoted = DraftResult.without_logits(tree), True
        draft.used.append(name)
        return draft


def _of_rows(request: DraftRequest, rows: Ints) -> DraftRequest:
    which = np.isin(request.rows, rows)
    assert request.reach is not None, "quotations have one"
    return replace(
        request,
        rows=rows,
        output_positions=request.output_positions[which],
        depths=request.depths[which],
        reach=request.reach[which],
    )
