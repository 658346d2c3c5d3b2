"""Quotations: drafts without a model, by themselves and in the place of a chain's.

Whatever a group's chain is, texts are looked up too. A row whose quotation promises more accepted
tokens than the chain was planned for, and at least one, by what quotations as probable as this one
have turned out to be worth, takes that as its draft: the models need not draft for it.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from processors import DraftRequest, DraftResult, TokenTree
from processors.grammar import prune
from specrouter.cycle import ChainGroup, DraftShape, Floats, Ints
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.runtime import Runtime

AcceptProb = Callable[[GroupDraft, TokenTree], Floats]  # [B, W], see `AcceptanceFeedback`


class Quotations:
    def __init__(self, runtime: Runtime, accept_prob: AcceptProb) -> None:
        self._runtime = runtime
        self._rows = runtime.rows
        self._manager = runtime.manager
        self._accept_prob = accept_prob

    def reach(self, group: ChainGroup, limits: Ints) -> Ints | None:
        """[B] levels down to which quotations of a group may go on, of rows that may go so far;
        None: as far as its shape."""
        quoter = self._runtime.drafters.get(group.quotes or "")
        reach = None if quoter is None else quoter.reach
        return None if reach is None else np.minimum(reach, limits)

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
        if name is None or name in group.chain or planned is None:
            return None
        least = max(1.0, planned.tokens - 1.0)  # accepted tokens that are worth another draft
        limits = self._rows.remaining(group.rows) - 1  # a row's last token is the target's own
        limits = np.minimum(limits, self._manager.room(group.rows))
        own = replace(
            group,
            chain=(name, group.chain[-1]),
            shape=DraftShape(1),
            rows=group.rows[limits > 0],
            branching=None,
            predicted=None,
        )
        reach = self.reach(own, limits[limits > 0])
        if reach is None:
            return None
        draft = self._drafted(name, own, reach)
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
        draft.request = draft.request.of_rows(chosen)
        draft.sampled = self._rows.sampled(chosen)
        draft.result = draft.result.of_rows(chosen)
        return draft

    def _drafted(self, name: str, group: ChainGroup, reach: Ints) -> GroupDraft:
        runtime, rows, nobody = self._runtime, group.rows, group.rows[:0]
        request = DraftRequest(
            rows=rows,
            output_positions=self._rows.output_positions(rows),
            depths=np.ones_like(rows),
            reach=reach,
        )
        tree = prune(runtime.drafters[name].quote(request), runtime.sampler.grammars)
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
