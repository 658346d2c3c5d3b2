"""TargetStage: the target verifies drafts, and reads prompts, in one pass.

Contract: what fails for one row is told in `CycleResult.errors`, and other rows go on. Where the
target fails, `StageError` is raised. Nothing is committed here.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from processors import (
    PrefillChunks,
    TokenTree,
    VerifyProcessor,
    VerifyRequest,
    VerifyResult,
    join,
)
from specrouter.cycle import CyclePlan, CycleResult, Ints
from specrouter.execution.fault_guard import RowGuard
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.model_comparison import PROMPT_POSITIONS
from specrouter.execution.runtime import Runtime


class TargetStage:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._target = runtime.pool.target
        self._rows = runtime.rows
        self._faults = runtime.faults
        self._states = runtime.states
        self._verify = VerifyProcessor(runtime.sampler)

    def verify(
        self, plan: CyclePlan, drafts: Sequence[GroupDraft], result: CycleResult
    ) -> VerifyResult | None:
        """What the target says of a plan's rows; None where there are none."""
        rows, positions = self._positions(plan, result)
        if not len(rows) and not len(plan.prefill_rows):
            return None
        offered = [draft.result for draft in drafts if draft.result is not None]
        if result.errors:  # rows that have ended are in no pack
            offered = [own for one in offered if len((own := one.of_rows(rows)).tree.rows)]
        drafted = [rows[:0], *(one.tree.rows for one in offered)]
        undrafted = TokenTree.empty(np.setdiff1d(rows, np.concatenate(drafted)))
        tree = join([*(one.tree for one in offered), undrafted])
        chunks = PrefillChunks(plan.prefill_rows, plan.prefill_counts)
        request = VerifyRequest(tree=tree, output_positions=positions, chunks=chunks)
        with self._faults.part("rows"):  # a request whose log-probabilities are forgotten ends
            request = self._with_earlier(request, chunks)
        return self._verified(request)

    def _positions(self, plan: CyclePlan, result: CycleResult) -> tuple[Ints, Ints]:
        """The rows that decode, ascending, and the positions of their next tokens among their
        output. Together, and one by one if that fails: a row that it fails for ends."""
        grouped = [group.rows for group in plan.groups]
        rows = np.sort(np.concatenate([plan.prefill_rows[:0], *grouped]))
        with self._faults.part("rows"):
            self._rows.sampler.forget_errors(rows)
            return rows, self._rows.output_positions(rows)
        sound, places = [rows[:0]], [rows[:0]]
        for at, row in enumerate(rows.tolist()):
            with RowGuard(result.errors, row, "the place in its text"):
                places.append(self._rows.output_positions(rows[at : at + 1]))
                sound.append(rows[at : at + 1])
        return np.concatenate(sound), np.concatenate(places)

    def _verified(self, request: VerifyRequest) -> VerifyResult:
        """Raises `StageError` where the target fails."""
        rows = request.tree.rows
        with self._states.stage(self._target, rows) as active:
            verified = self._verify.verify(active, request)
            self._states.touch(active.state, rows, verified.fed)
            if verified.poisoned.any():
                active.state.scrub(verified.fed.flat_slots[verified.poisoned])
        return verified

    def _with_earlier(self, asked: VerifyRequest, chunks: PrefillChunks) -> VerifyRequest:
        """And the places before roots whose logits are of use."""
        rows, is_asked = asked.tree.rows, self._rows.prompt_logprobs.asked
        behind = self._states.lag(self._target, rows)
        of_chunks = np.where(is_asked(chunks.rows), chunks.counts, 0)
        return replace(
            asked,
            earlier=self._earlier(behind, is_asked(rows)),
            chunks=replace(chunks, earlier=of_chunks),
        )

    def _earlier(self, behind: Ints, asked: NDArray[np.bool_]) -> Ints:
        """[B] places before the roots whose logits are of use: a prompt's end, which drafters will
        be compared with when they read it, or all of it.

        Args:
            behind: [B] tokens that are read before each root.
            asked: [B] whether the log-probabilities of the row's prompt are wanted.
        """
        return np.where(asked, behind, np.minimum(behind, PROMPT_POSITIONS))
