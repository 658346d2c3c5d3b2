"""CommitStage: what rows gain of a verification, committed row by row.

Contract: a row for which choosing, log-probabilities or committing fails gains nothing, or what
came before the failure, and ends with the reason in `CycleResult.errors`. Others gain what they
would have.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from processors import VerifyResult
from processors.errors import RowFault
from processors.grammar import GrammarError
from processors.token_tree import ROOT
from specrouter.cycle import Commit, CycleResult, Ints
from specrouter.execution.fault_guard import RowGuard
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.logprobs import AskedLogprobs, token_logprobs
from specrouter.execution.runtime import Runtime
from specrouter.request.output import STRUCTURE_FAILED, TokenLogprobs
from specrouter.request.params import Chain


class CommitStage:
    def __init__(self, runtime: Runtime) -> None:
        self._target = runtime.pool.target
        self._rows = runtime.rows
        self._faults = runtime.faults

    def commit(
        self, verified: VerifyResult, drafts: Sequence[GroupDraft], result: CycleResult
    ) -> None:
        chains: dict[int, Chain] = {}
        with self._faults.part("drafting"):  # who has drafted is told, and nothing hangs on it
            for draft in drafts:
                chains.update(dict.fromkeys(draft.rows.tolist(), (*draft.used, self._target)))
        paths = self._sound_paths(verified, result)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        with self._faults.part("rows"):
            logprobs = self._logprobs(verified, paths, result)
        for index, path in paths.items():
            row = int(verified.tree.rows[index])
            with RowGuard(result.errors, row, "committing its tokens"):
                of_tokens = logprobs.get(index)
                is_told = of_tokens is not None or self._rows.logprobs(row) is None
                assert is_told, "its log-probabilities are not known"
                self._rows.extend(row, path)
                of_prompt = self._rows.prompt_logprobs.take(row)
                drafted, chain = int(verified.tree.sizes[index]), chains.get(row, (self._target,))
                result.commits.append(
                    Commit(
                        row=row,
                        tokens=path.tolist(),
                        chain=chain,
                        logprobs=of_tokens,
                        prompt_logprobs=of_prompt,
                        drafted=drafted,
                    )
                )

    def _sound_paths(self, verified: VerifyResult, result: CycleResult) -> dict[int, Ints]:
        """By index: what each row gains, as far as tokens could be chosen."""
        paths, failed = dict[int, Ints](), dict[int, Exception]()
        with self._faults.part("rows"):
            failed = self._rows.sampler.take_errors()
        for index, row in enumerate(verified.tree.rows.tolist()):
            if row in result.errors:
                continue
            with RowGuard(result.errors, row, "choosing its tokens"):
                path = verified.path(index)
                if not verified.sound[index]:  # what comes before is good, and may end the text
                    result.errors[row] = self._reason(row, failed, verified.broken[index].any())
                    path = path[: verified.sound_length(index)]
                if len(path):
                    paths[index] = path
        return paths

    def _reason(self, row: int, failed: Mapping[int, Exception], is_broken: bool) -> str:
        """Why no token could be chosen for a row."""
        if row in failed:
            error = failed[row]
            if isinstance(error, GrammarError):
                return f"{STRUCTURE_FAILED}: {error}"
            if isinstance(error, RowFault):
                return str(error)
            return f"a logits processor failed: {type(error).__name__}: {error}"
        if is_broken:
            return f"{self._target} gave logits that are not numbers"
        return "the sampling parameters leave no token to choose"

    def _logprobs(
        self, verified: VerifyResult, paths: dict[int, Ints], result: CycleResult
    ) -> dict[int, list[TokenLogprobs]]:
        """By index: of the paths' tokens, where the request asked for them. Together, and one by
        one if that fails: a row that it fails for gains nothing."""
        asked = {}
        rows = verified.tree.rows.tolist()
        for index in list(paths):
            with RowGuard(result.errors, rows[index], "its log-probabilities"):
                count = self._rows.logprobs(rows[index])
                if count is not None:
                    after = np.append(ROOT, verified.walk(index))[: len(paths[index])]
                    places = verified.places[index, after + 1]
                    asked[index] = AskedLogprobs(places, paths[index], count)
                continue
            del paths[index]
        if not asked:
            return {}
        with self._faults.part("rows"):
            found = token_logprobs(verified.logits, list(asked.values()))
            return dict(zip(asked, found, strict=True))
        each: dict[int, list[TokenLogprobs]] = {}
        for index, one in asked.items():
            with RowGuard(result.errors, rows[index], "its log-probabilities"):
                each[index] = token_logprobs(verified.logits, [one])[0]
                continue
            del paths[index]
        return each
