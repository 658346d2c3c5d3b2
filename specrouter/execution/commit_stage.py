"""The last stage of a cycle: verified tokens are committed, row by row.

Contract: a row for which choosing, log-probabilities or committing fails gains no tokens, or those
before the failure, and ends with the reason in `CycleResult.errors`. Other rows are not affected.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from processors import VerifyResult
from processors.errors import RowFault
from processors.grammar import GrammarError
from processors.token_tree import ROOT
from specrouter.cycle import Commit, CycleResult, Ints
from specrouter.execution.draft_trace import traced
from specrouter.execution.fault_guard import RowGuard
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.logprobs import AskedLogprobs, token_logprobs
from specrouter.execution.runtime import Runtime
from specrouter.request.output import NO_TOKEN_LEFT, STRUCTURE_FAILED, CycleDraft, TokenLogprobs


class CommitStage:
    def __init__(self, runtime: Runtime) -> None:
        self._target = runtime.pool.target
        self._rows = runtime.rows
        self._faults = runtime.faults
        self._quoters = {one.name for one in runtime.drafters.values() if one.outputs is not None}

    def commit(
        self, verified: VerifyResult, drafts: Sequence[GroupDraft], result: CycleResult
    ) -> None:
        """Commit each row's tokens to `result`; `drafts`: the verified drafts."""
        paths = self._sound_paths(verified, result)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        with self._faults.part("rows"):  # all rows together; one by one below if that fails
            logprobs = self._logprobs(verified, paths)
        for index, path in paths.items():
            row = int(verified.tree.rows[index])
            with RowGuard(result.errors, row, "its log-probabilities"):
                if index not in logprobs and self._rows.logprobs(row) is not None:
                    logprobs |= self._logprobs(verified, {index: path})
                with RowGuard(result.errors, row, "committing its tokens"):
                    self._rows.extend(row, path)
                    result.commits.append(
                        Commit(
                            row=row,
                            tokens=path.tolist(),
                            chain=result.chains.get(row, (self._target,)),
                            logprobs=logprobs.get(index),
                            prompt_logprobs=self._rows.prompt_logprobs.take(row),
                            drafted=int(verified.tree.sizes[index]),
                            draft=self._draft(verified, drafts, index),
                        )
                    )

    def _draft(
        self, verified: VerifyResult, drafts: Sequence[GroupDraft], index: int
    ) -> CycleDraft | None:
        """Return a row's draft, or None if its request does not ask or it had none."""
        row = int(verified.tree.rows[index])
        if self._rows.returns_drafts(row):
            with self._faults.part("feedback"):
                return traced(verified, drafts, index, self._target, self._quoters)
        return None

    def _sound_paths(self, verified: VerifyResult, result: CycleResult) -> dict[int, Ints]:
        """Return the tokens that each row gains, by index, up to the first that failed."""
        paths, failed = dict[int, Ints](), dict[int, Exception]()
        with self._faults.part("rows"):
            failed = self._rows.sampler.take_errors()
            self._note_prompts(verified, result)
        for index, row in enumerate(verified.tree.rows.tolist()):
            if row in result.errors:
                continue
            with RowGuard(result.errors, row, "choosing its tokens"):
                path = verified.path(index)
                if not verified.sound[index]:  # earlier tokens are valid, and may end the text
                    result.errors[row] = self._reason(row, failed, verified.broken[index].any())
                    path = path[: verified.sound_length(index)]
                if len(path):
                    paths[index] = path
        return paths

    def _reason(self, row: int, failed: Mapping[int, Exception], is_broken: bool) -> str:
        if row in failed:
            error = failed[row]
            if isinstance(error, GrammarError):
                return f"{STRUCTURE_FAILED}: {error}"
            if isinstance(error, RowFault):
                return str(error)
            return f"a logits processor failed: {type(error).__name__}: {error}"
        if is_broken:
            return f"{self._target} gave logits that are not numbers"
        return NO_TOKEN_LEFT

    def _note_prompts(self, verified: VerifyResult, result: CycleResult) -> None:
        """Keep prompt log-probabilities; a request for which this fails ends."""
        for row, logits in verified.earlier.items():
            with RowGuard(result.errors, row, "log-probabilities of the prompt"):
                self._rows.prompt_logprobs.note(row, logits)

    def _logprobs(
        self, verified: VerifyResult, paths: Mapping[int, Ints]
    ) -> dict[int, list[TokenLogprobs]]:
        """Return log-probabilities of the paths' tokens, by index, for requests that ask."""
        asked = {}
        for index, path in paths.items():
            count = self._rows.logprobs(int(verified.tree.rows[index]))
            if count is not None:
                after = np.append(ROOT, verified.walk(index))[: len(path)]
                asked[index] = AskedLogprobs(verified.places[index, after + 1], path, count)
        found = token_logprobs(verified.logits, list(asked.values())) if asked else []
        return dict(zip(asked, found, strict=True))
