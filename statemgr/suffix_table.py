"""SuffixTable: a drafter without weights, which proposes what followed the same tokens before.

Contract: a row's text is its prompt and committed output, which only grows while the row is open.
Continuations are looked up in that text, in the output that the caller expects, and in earlier
outputs of the same tenant (`OutputStore`), but never in those of other tenants. A prediction is a
function of these and of the path that is asked for, not of how the text arrived. A row takes about
half a kilobyte a token, until it is closed.

Each occurrence of the last tokens votes for the token that followed it. With c_l(v) the votes of
occurrences that share at least l tokens with the text, l = 1, 2, 4, ...:

    p_l(v) = (c_l(v) + k_l * p_(l/2)(v)) / (total_l + k_l),    p_(1/2)(v) = 1 / V,    k_l = 4 / l

Thus a few long occurrences outweigh many short ones, and a single occurrence counts more the longer
it is. The most recent occurrence counts a little more than the others, so that of successors seen
equally often the last one wins. The expected output counts several times, because most of it comes
true.
Sources: SuffixDecoding (Oliaro et al., arXiv 2411.04975); Saxena, prompt lookup decoding; Cleary
and Witten, prediction by partial matching; the back-off of MacKay and Peto (a Dirichlet prior whose
mean is the shorter context's prediction).
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from statemgr.arrays import Floats, Ints
from statemgr.output_store import OutputStore
from statemgr.suffix_index import Match, SuffixIndex

OWN_ORDERS = (1, 2, 4, 16)  # lengths of contexts in a row's own text
_LEAD = OWN_ORDERS[-1]  # tokens of the prompt's end before the expected output
_PRIOR = 4.0  # k_l * l
_RECENCY = 0.1
_EXPECTED = 3.0


class _Source(NamedTuple):
    texts: SuffixIndex
    weight: float
    first: int = 0  # matches before this place repeat another source


class Place(NamedTuple):
    """A position in a row's text, or after draft tokens that continue it.

    An occurrence stays as long as it continues like the path; when none is left, there is another
    look-up.

    Attributes:
        recent: the last tokens.
        matches: occurrences of these tokens, the best sources first.
    """

    recent: "array[int]"
    matches: tuple[tuple[_Source, Match], ...]


class _Text:
    """A row's own text, `committed` tokens of it, and the other sources for its drafts."""

    def __init__(self, prompt_tokens: int, expected: Sequence[int], tenant: str | None) -> None:
        self.own = SuffixIndex(OWN_ORDERS)
        self.sources = [_Source(self.own, 1.0)]
        self.tenant = tenant
        self.committed = 0
        self._prompt_tokens = prompt_tokens
        self._to_expect = list(expected)

    def read(self, tokens: list[int]) -> None:
        """Read more of the prompt, and then of the output."""
        before = min(max(0, self._prompt_tokens - self.committed), len(tokens))
        self.own.append(tokens[:before])
        if self._to_expect and self.committed + before >= self._prompt_tokens:
            expected, lead = SuffixIndex(OWN_ORDERS), self.own.tail(_LEAD)
            expected.append([*lead, *self._to_expect])
            self.sources.insert(0, _Source(expected, _EXPECTED, len(lead)))
            self._to_expect = []
        self.own.append(tokens[before:])
        self.committed += len(tokens)


class SuffixTable:
    """Texts of open rows, with predictions; rows that are not open raise `KeyError`."""

    def __init__(self, vocab_size: int, outputs: OutputStore | None = None) -> None:
        self._vocab_size = vocab_size
        self._outputs = OutputStore(0) if outputs is None else outputs
        self._texts: dict[int, _Text] = {}

    def open(
        self,
        row: int,
        prompt_tokens: int = 0,
        expected: Sequence[int] = (),
        tenant: str | None = None,
    ) -> None:
        """Begin a row with an empty text.

        Args:
            row: the row.
            prompt_tokens: number of prompt tokens in its text.
            expected: tokens that may follow the prompt, as the caller expects.
            tenant: the tenant whose earlier outputs are also searched; None: no outputs are.
        """
        self._texts[row] = _Text(prompt_tokens, expected, tenant)

    def close(self, row: int) -> None:
        """Forget a row; do nothing if it is not open."""
        self._texts.pop(row, None)

    def end(self, row: int, committed: Ints) -> Place:
        """Read the new ones of a row's committed tokens, [n], and return the place after them."""
        text = self._texts[row]
        assert len(committed) >= text.committed, f"the text of row {row} shrank"
        if len(committed) > text.committed:
            text.read(committed[text.committed :].tolist())
        own = text.own.tail(text.committed)
        return Place(own[-OWN_ORDERS[-1] :], self._looked_up(text, own))

    def after(self, row: int, where: Place, token: int) -> Place:
        """Return the place after one more token."""
        recent = array("i", [*where.recent[1 - OWN_ORDERS[-1] :], token])
        kept = tuple(
            (source, further)
            for source, match in where.matches
            if (further := source.texts.further(match, token)) is not None
        )
        return Place(recent, kept or self._looked_up(self._texts[row], recent))

    def predict(self, row: int, where: Place) -> tuple[Ints, Floats]:
        """Return ids that may follow, the most probable first, and their probabilities.

        The probability that is missing to 1 is spread evenly over all other ids.
        """
        votes, recency = list[tuple[int, int, float]](), _RECENCY
        for source, match in where.matches:
            token = source.texts.token(match.place)
            votes.append((match.length, token, source.weight + recency))
            recency = 0.0
        shares = _interpolated(votes, 1.0 / self._vocab_size)  # the most recent come first
        best = sorted(shares, key=shares.__getitem__, reverse=True)
        return np.array(best, dtype=np.int64), np.array([shares[token] for token in best])

    def _looked_up(self, text: _Text, context: "array[int]") -> tuple[tuple[_Source, Match], ...]:
        earlier = None if text.tenant is None else self._outputs.of(text.tenant)
        further = [] if earlier is None else [_Source(earlier, 1.0)]
        found = [
            (one, match)
            for one in (*text.sources, *further)
            for match in one.texts.matches(context)
            if match.place >= one.first
        ]
        # Matches of at most half the longest length add nothing to it.
        longest = max((match.length for _, match in found), default=0)
        return tuple(one for one in found if 2 * one[1].length > longest)


def _interpolated(votes: Sequence[tuple[int, int, float]], unseen: float) -> dict[int, float]:
    """Return the probabilities of tokens with votes: (length, token, weight) per occurrence."""
    seen = {token: unseen for _, token, _ in votes}
    longest, length = max((length for length, _, _ in votes), default=0), 1
    counts, total, shortest = dict[int, float](), 0.0, 0  # of votes of at least that length
    while length <= longest:
        if length > shortest:
            votes = [vote for vote in votes if vote[0] >= length]
            shortest = min(shared for shared, _, _ in votes)
            counts, total = {}, sum(weight for _, _, weight in votes)
            for _, token, weight in votes:
                counts[token] = counts.get(token, 0.0) + weight
        prior = _PRIOR / length
        scale = 1.0 / (total + prior)
        for token, probability in seen.items():
            seen[token] = (counts.get(token, 0.0) + prior * probability) * scale
        length *= 2
    return seen
