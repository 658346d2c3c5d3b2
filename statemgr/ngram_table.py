"""What followed what in each request's own text: a drafter that needs no weights.

Contract: a row's text is its prompt and committed output, which only grows while the row is
open; what its caller expects of the output is read like a text that follows the prompt. A
prediction is a function of that text and of the suffix asked for, not of how the text arrived. A
row takes about half a kilobyte a token, until it is closed.

The probability of id v after the last m tokens interpolates with that after the last m - 1:

    p_m(v) = (c_m(v) + k_m * p_(m-1)(v)) / (total_m + k_m),    p_0(v) = 1 / V

c_m(v) counts how often v followed them, among the latest occurrences only. The most recent one
counts a little more than the others, so that of successors seen equally often the last one wins.
What is expected of the output counts several times: most of it comes true.
Sources: Saxena, prompt lookup decoding; Cleary and Witten, prediction by partial matching; the
back-off of MacKay and Peto (a Dirichlet prior whose mean is the shorter context's prediction).
"""

from collections.abc import Sequence

from statemgr.arrays import Floats, Ints
from statemgr.text_table import ranked

MAX_ORDER = 4  # tokens of context, at most
MAX_CANDIDATES = 32

# k_m: one sighting after a short context proves little. With these (and the bonus for recency)
# predictions on prose and on code come true about as often as they say.
_PRIOR = (8.0, 4.0, 2.0, 1.0)
_OCCURRENCES = 64  # of a context, at most, that a prediction looks at
_RECENCY = 0.1  # what the most recent occurrence counts more
_EXPECTED = 3.0  # what an occurrence counts in what the caller expects of the output
_NOWHERE = -1


class NgramTable:
    """Implements `TextTable`. `sync` opens a row that is not; otherwise it raises `KeyError`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._texts: dict[int, _Text] = {}

    def open(
        self,
        row: int,
        prompt_tokens: int = 0,
        expected: Sequence[int] = (),
        tenant: str | None = None,
    ) -> None:
        """See `TextTable`. No earlier outputs are kept here."""
        self._texts[row] = _Text(prompt_tokens, list(expected))

    def close(self, row: int) -> None:
        """Forgets a row; nothing, if it is not open."""
        self._texts.pop(row, None)

    def sync(self, row: int, committed: Ints) -> None:
        """Reads what it has not yet seen of a row's tokens [n]."""
        text = self._texts.setdefault(row, _Text(0, []))
        assert len(committed) >= text.committed, f"the text of row {row} shrank"
        if len(committed) > text.committed:
            text.read(committed[text.committed :].tolist())

    def end(self, row: int, committed: Ints) -> tuple[int, ...]:
        self.sync(row, committed)
        return tuple(committed[-MAX_ORDER:].tolist())

    def after(self, row: int, where: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*where, token)[-MAX_ORDER:]

    def predict(self, row: int, suffix: Sequence[int]) -> tuple[Ints, Floats]:
        """What may follow `suffix`, the last tokens of the text or of a path that goes on from it:
        ids that followed its end before, of equals the most recent one first, at most
        `MAX_CANDIDATES`.
        """
        text = self._texts[row]
        context = tuple(map(int, suffix[-MAX_ORDER:]))
        unseen = 1.0 / self._vocab_size  # the probability of each id that never followed
        seen: dict[int, float] = {}
        for order in range(1, len(context) + 1):
            counts = text.followers(context[-order:])
            if not counts:
                break  # nor has a longer context occurred
            prior = _PRIOR[order - 1]
            scale = 1.0 / (sum(counts.values()) + prior)
            for token in counts:
                seen.setdefault(token, unseen)
            for token, probability in seen.items():
                seen[token] = (counts.get(token, 0.0) + prior * probability) * scale
            unseen *= prior * scale
        return ranked(seen, MAX_CANDIDATES)  # followers come most recent first


class _Text:
    """One row's tokens, and for each order where its contexts begin.

    Attributes:
        tokens: the prompt, what is expected after it, and the output.
        committed: tokens of the prompt and the output.
    """

    def __init__(self, prompt_tokens: int, expected: list[int]) -> None:
        self.tokens: list[int] = []
        self.committed = 0
        self._prompt_tokens = prompt_tokens
        self._expected = expected
        # By order: context -> where it last began; a beginning -> the one before it.
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(MAX_ORDER)]
        self._earlier: list[list[int]] = [[] for _ in range(MAX_ORDER)]

    def read(self, tokens: list[int]) -> None:
        """More of the prompt, and then of the output."""
        before = max(0, self._prompt_tokens - self.committed)
        self._append(tokens[:before])
        if len(self.tokens) == self._prompt_tokens:
            self._append(self._expected)
        self._append(tokens[before:])
        self.committed += len(tokens)

    def _append(self, tokens: list[int]) -> None:
        self.tokens += tokens
        for order in range(1, MAX_ORDER + 1):
            latest, earlier = self._latest[order - 1], self._earlier[order - 1]
            start, end = len(earlier), len(self.tokens) - order  # the last has no follower yet
            if start >= end:
                return  # nor have longer contexts
            columns = (self.tokens[start + k : end + k] for k in range(order))
            for begin, context in enumerate(zip(*columns, strict=True), start):
                earlier.append(latest.get(context, _NOWHERE))
                latest[context] = begin

    def followers(self, context: tuple[int, ...]) -> dict[int, float]:
        """How often each id followed `context`, the most recent first."""
        order = len(context)
        earlier = self._earlier[order - 1]
        begin = self._latest[order - 1].get(context, _NOWHERE)
        counts: dict[int, float] = {}
        recency = _RECENCY
        for _ in range(_OCCURRENCES):
            if begin == _NOWHERE:
                break
            place = begin + order
            token = self.tokens[place]
            count = _EXPECTED if self._is_expected(place) else 1.0
            counts[token] = counts.get(token, 0.0) + count + recency
            recency = 0.0
            begin = earlier[begin]
        return counts

    def _is_expected(self, place: int) -> bool:
        return 0 <= place - self._prompt_tokens < len(self._expected)
