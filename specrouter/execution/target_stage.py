"""TargetStage: the target verifies drafts, and reads prompts, in one pass.

Contract: what fails for one row is told in `CycleResult.errors`, and other rows go on. Where the
target fails, `StageError` is raised. Nothing is committed here.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from processors import (
    ActiveModel,
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
from specrouter.execution.model_comparison import ModelComparison
from specrouter.execution.runtime import Runtime


class TargetStage:
    def __init__(self, runtime: Runtime, comparison: ModelComparison) -> None:
        self._runtime = runtime
        self._target = runtime.pool.target
        self._rows = runtime.rows
        self._faults = runtime.faults
        self._states = runtime.states
        self._comparison = comparison
        self._verify = VerifyProcessor(runtime.sampler, runtime.rule)

    def verify(
        self, plan: CyclePlan, drafts: Sequence[GroupDraft], level: int, result: CycleResult
    ) -> VerifyResult | None:
        """What the target says of a plan's rows; None where there are none.

        Args:
            level: of the target among the models of its cycle; see `AcceptanceRule.accept`.
        """
        rows, positions = self._positions(plan, result)
        if not len(rows) and not len(plan.prefill_rows):
            return None
        offered = [draft.result for draft in drafts if draft.result is not None]
        if result.errors:  # rows that have ended are in no pack
            offered = [own for one in offered if len((own := one.of_rows(rows)).tree.rows)]
        drafted = [rows[:0], *(one.tree.rows for one in offered)]
        undrafted = TokenTree.empty(np.setdiff1d(rows, np.concatenate(drafted)))
        tree = join([*(one.tree for one in offered), undrafted])
        with self._faults.part("rows"):
            self._rows.sampler.forget_errors(tree.rows)
        request = VerifyRequest(tree=tree, output_positions=positions, drafts=offered, level=level)
        return self._verified(plan, request, result)

    def _positions(self, plan: CyclePlan, result: CycleResult) -> tuple[Ints, Ints]:
        """The rows that decode, ascending, and the positions of their next tokens among their
        output. Together, and one by one if that fails: a row that it fails for ends."""
        grouped = [group.rows for group in plan.groups]
        rows = np.sort(np.concatenate([plan.prefill_rows[:0], *grouped]))
        with self._faults.part("rows"):
            return rows, self._rows.output_positions(rows)
        sound, positions = [rows[:0]], [rows[:0]]
        for at, row in enumerate(rows.tolist()):
            with RowGuard(result.errors, row, "the place in its text"):
                positions.append(self._rows.output_positions(rows[at : at + 1]))
                sound.append(rows[at : at + 1])
        return np.concatenate(sound), np.concatenate(positions)

    def _verified(self, plan: CyclePlan, asked: VerifyRequest, result: CycleResult) -> VerifyResult:
        """Raises `StageError` where the target fails."""
        rows, started = asked.tree.rows, time.perf_counter()
        with self._states.stage(self._target, rows) as active:
            with self._faults.part("timing"):
                started = self._runtime.begin_stage()
            verified = self._verify.verify(active, self._request(active, plan, asked))
            self._states.touch(active.state, rows, verified.fed)
            if verified.poisoned.any():
                active.state.scrub(verified.fed.flat_slots[verified.poisoned])
        with self._faults.part("feedback"):
            self._comparison.keep_prompt_ends(verified)
        with self._faults.part("rows"):  # a request whose log-probabilities are forgotten ends
            for row, logits in verified.earlier.items():
                with RowGuard(result.errors, row, "log-probabilities of the prompt"):
                    self._rows.prompt_logprobs.note(row, logits)
        with self._faults.part("timing"):
            places = int((verified.places >= 0).sum())
            self._runtime.end_stage("verify", places, started)
        return verified

    def _request(self, active: ActiveModel, plan: CyclePlan, asked: VerifyRequest) -> VerifyRequest:
        """With the plan's chunks, and the places before roots whose logits are of use."""
        chunks = PrefillChunks(plan.prefill_rows, plan.prefill_counts)
        request = replace(asked, chunks=chunks)
        with self._faults.part("rows"):  # as for those that are not noted
            is_asked = self._rows.prompt_logprobs.asked
            earlier = np.where(is_asked(chunks.rows), chunks.counts, 0)
            return replace(
                request,
                earlier=self._earlier(active.lag(asked.tree.rows), is_asked(asked.tree.rows)),
                chunks=replace(chunks, earlier=earlier),
            )
        return request

    def _earlier(self, behind: Ints, asked: NDArray[np.bool_]) -> Ints:
        """[B] places before the roots whose logits are of use: a prompt's end, which drafters will
        be compared with when they read it, or all of it.

        Args:
            behind: [B] tokens that are read before each root.
            asked: [B] whether the log-probabilities of the row's prompt are wanted.
        """
        return np.where(asked, behind, np.minimum(behind, self._comparison.prompt_positions))
