"""RejectionSampling: Leviathan's rule, with noise of its own at every level of a chain.

Drafts are paths, of tokens drawn from their drafter's distribution. A verifier accepts or refuses
them one by one, and draws one token more (`processors.leviathan` has the rule and why chains of any
length stay exact). No node may be left out because of its token, so drafts are neither pruned nor
selected from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from processors.drafted_paths import DraftedPaths
from processors.drafts import DraftRequest, DraftResult
from processors.grammar import TokenGrammar
from processors.ngram import NoiseLookup
from processors.sampler import Sampler
from processors.token_tree import Ints, TokenTree
from processors.verify_result import VerifierForward, VerifyResult


class RejectionSampling:
    """Implements `AcceptanceRule`."""

    shares_noise = False
    verifies_whole_drafts = True

    def noise_purpose(self, level: int) -> int:
        return level + 1  # 0 is the noise that all models share

    def shaped(self, request: DraftRequest) -> DraftRequest:
        """Of width 1."""
        return replace(request, width=1, branching=None)

    def noise_lookup(self, sampler: Sampler) -> NoiseLookup:
        """None: what is drafted without chance is accepted or refused by the verifier's alone."""
        return _no_noise

    def legal(self, tree: TokenTree, grammars: Mapping[int, TokenGrammar]) -> TokenTree:
        """All of it: a verifier refuses what its grammar does not allow by its own distribution."""
        return tree

    def accept(
        self,
        sampler: Sampler,
        forward: VerifierForward,
        drafts: Sequence[DraftResult],
        level: int,
        rescore: bool,
    ) -> VerifyResult:
        """Waits for the device a few times. Log-probabilities are not found: a draft needs none."""
        tree, places = forward.tree, forward.places
        paths = DraftedPaths(sampler, forward, drafts)
        purpose = self.noise_purpose(level)
        accepted, is_told = paths.accepted(purpose)
        emitted, finite_there = paths.emitted(accepted, purpose)
        finite, broken = np.ones(places.shape, np.bool_), np.zeros(places.shape, np.bool_)
        last = np.arange(len(tree.rows)), accepted  # a node is accepted by numbers only
        finite[last] = finite_there & is_told
        broken[places >= 0] = forward.logits.amax(dim=1).isnan().cpu().numpy()
        choices = np.zeros(places.shape, dtype=np.int64)
        choices[:, :-1] = tree.tokens
        choices[last] = emitted
        return VerifyResult(
            forward=forward,
            accepted=np.arange(tree.tokens.shape[1]) < accepted[:, None],
            choices=choices,
            choice_log_probs=np.where(
                finite, 0.0, -np.inf
            ),  # where nothing could be drawn, nothing is handed on
            node_log_probs=np.zeros(tree.tokens.shape),
            finite=finite,
            broken=broken,
        )

    def next_draft(
        self, result: VerifyResult, *, hard_rejection: bool, is_path: bool
    ) -> DraftResult:
        """The accepted path and the token drawn after it: without that token the next level would
        take accepted ones for draws from the verifier's distribution, which they are not."""
        return result.draft(hard_rejection=False, is_path=True)


def _no_noise(row: int, position: int, ids: Ints) -> NDArray[np.float64]:
    return np.zeros(len(ids))
