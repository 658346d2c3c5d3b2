"""AcceptanceRule: how draft tokens are chosen, and what a verifier accepts and emits.

Contract: whatever was drafted, by however many levels, the tokens that a rule emits are
distributed as the verifier's own. Two rules: `SharedNoise`, the default, under which the tokens of
a seed are even the same whoever drafts, and `RejectionSampling`. A rule has no state: noise comes
from the `Sampler`, as a pure function of seed, position and purpose.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from processors.drafts import DraftRequest, DraftResult
from processors.grammar import TokenGrammar
from processors.ngram import NoiseLookup
from processors.sampler import Sampler
from processors.token_tree import TokenTree
from processors.verify_result import VerifierForward, VerifyResult


class AcceptanceRule(Protocol):
    @property
    def shares_noise(self) -> bool:
        """All models choose with the same noise: a committed token tells what any of them would
        have drafted there."""

    @property
    def verifies_whole_drafts(self) -> bool:
        """No node may be left out because of its token before a verifier has seen it."""

    def noise_purpose(self, level: int) -> int:
        """Of the noise by which a level of a chain chooses (`Sampler.scores`); 0: the drafter."""

    def shaped(self, request: DraftRequest) -> DraftRequest:
        """The request with the shape that the rule can verify."""

    def noise_lookup(self, sampler: Sampler) -> NoiseLookup:
        """The noise by which a drafter without a model chooses."""

    def legal(self, tree: TokenTree, grammars: Mapping[int, TokenGrammar]) -> TokenTree:
        """What of a drafted tree goes to the next level. `grammars`: by row."""

    def accept(
        self,
        sampler: Sampler,
        forward: VerifierForward,
        drafts: Sequence[DraftResult],
        level: int,
        rescore: bool,
    ) -> VerifyResult:
        """What a verifier accepts of the trees that it has read.

        Args:
            drafts: that the forward's tree joins, as they were drafted.
            level: of the verifier in its chain, the drafter's being 0.
            rescore: also find log-probabilities of nodes and choices, for the next level.
        """

    def next_draft(
        self, result: VerifyResult, *, hard_rejection: bool, is_path: bool
    ) -> DraftResult:
        """What an intermediate hands to the next level.

        Args:
            hard_rejection: only what it accepted (SpecRouter, section 4.3).
            is_path: only the accepted path and the choice at its end, else the whole tree.
        """
