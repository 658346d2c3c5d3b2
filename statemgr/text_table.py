"""What a drafter without weights asks of the texts that it drafts from."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from statemgr.arrays import Floats, Ints

Where = TypeVar("Where")


class TextTable(Protocol[Where]):
    """Texts of open rows. `Where`: a place in a row's text, or on a path that goes on from it."""

    def open(
        self,
        row: int,
        prompt_tokens: int = 0,
        expected: Sequence[int] = (),
        tenant: str | None = None,
    ) -> None:
        """Begins a row with an empty text.

        Args:
            prompt_tokens: of its text.
            expected: what may follow them, in the caller's view.
            tenant: whose earlier outputs may be quoted, where there are any; None: nobody's.
        """
        ...

    def close(self, row: int) -> None:
        """Forgets a row; nothing, if it is not open."""
        ...

    def end(self, row: int, committed: Ints) -> Where:
        """After a row's tokens [n], of which what has not been seen yet is read."""
        ...

    def after(self, row: int, where: Where, token: int) -> Where:
        """One token on."""
        ...

    def predict(self, row: int, where: Where) -> tuple[Ints, Floats]:
        """Ids that may follow, the most probable first, and their probabilities. What is missing
        to 1 is spread evenly over all other ids."""
        ...


def ranked(seen: Mapping[int, float], most: int | None = None) -> tuple[Ints, Floats]:
    """What `TextTable.predict` returns of these probabilities; of equals the first is first."""
    best = sorted(seen.items(), key=lambda entry: -entry[1])[:most]
    ids, probabilities = [token for token, _ in best], [chance for _, chance in best]
    return np.array(ids, dtype=np.int64), np.array(probabilities, dtype=np.float64)


def whole_distribution(ids: Ints, probabilities: Floats, vocab_size: int) -> Floats:
    """[V], the whole of what `TextTable.predict` says; positive where the rest is, sums to 1."""
    others = max(vocab_size - len(ids), 1)
    rest = max(1.0 - float(probabilities.sum()), 0.0)
    whole = np.full(vocab_size, rest / others)
    whole[ids] = probabilities
    return whole
