"""The target's pass of a cycle, which verifies drafts and reads prompts.

Contract: a failure for one row is noted in `CycleResult.errors`, and does not affect other rows. If
the target fails, `StageError` is raised. Nothing is committed here.
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
        """Return the target's verification of a plan's rows, or None if there are no rows."""
        rows, positions = self._positions(plan, result)
        if not len(rows) and not len(plan.prefill_rows):
            return None
        offered = [draft.result for draft in drafts if draft.result is not None]
        if result.errors:  # rows that have failed are left out of the pack
            offered = [own for one in offered if len((own := one.of_rows(rows)).tree.rows)]
        drafted = [rows[:0], *(one.tree.rows for one in offered)]
        undrafted = TokenTree.empty(np.setdiff1d(rows, np.concatenate(drafted)))
        tree = join([*(one.tree for one in offered), undrafted])
        chunks = PrefillChunks(plan.prefill_rows, plan.prefill_counts)
        request = VerifyRequest(tree=tree, output_positions=positions, chunks=chunks)
        with self._faults.part("rows"):  # without them, a request that asks for logprobs ends
            request = self._with_earlier(request, chunks)
        return self._verified(request)

    def _positions(self, plan: CyclePlan, result: CycleResult) -> tuple[Ints, Ints]:
        """Return the decoding rows, ascending, and the output positions of their next tokens.

        If that fails for all rows together, it is tried row by row; rows that fail end.
        """
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
        """Run the target's pass; raise `StageError` if it fails."""
        rows = request.tree.rows
        with self._states.stage(self._target, rows) as active:
            verified = self._verify.verify(active, request)
            self._states.touch(active.state, rows, verified.fed)
            if verified.poisoned.any():
                active.state.scrub(verified.fed.flat_slots[verified.poisoned])
        return verified

    def _with_earlier(self, asked: VerifyRequest, chunks: PrefillChunks) -> VerifyRequest:
        """Return the request with the positions before roots whose logits are needed."""
        rows, is_asked = asked.tree.rows, self._rows.prompt_logprobs.asked
        behind = self._states.lag(self._target, rows)
        of_chunks = np.where(is_asked(chunks.rows), chunks.counts, 0)
        return replace(
            asked,
            earlier=self._earlier(behind, is_asked(rows)),
            chunks=replace(chunks, earlier=of_chunks),
        )

    def _earlier(self, behind: Ints, asked: NDArray[np.bool_]) -> Ints:
        """Return [B]: the number of positions before each root whose logits are needed.

        These are the end of a prompt, which drafters are compared at later, or all of it.

        Args:
            behind: [B] tokens that are read before each root.
            asked: [B] True for rows with a request for prompt log-probabilities.
        """
        return np.where(asked, behind, np.minimum(behind, PROMPT_POSITIONS))
