"""RecordedText: a text that a request is made to say, token by token. For measurements.

A recorded output is replayed: the target reads every draft as always and is timed as always, and
its choice is the recorded token, whatever its logits say. Drafters and intermediate models know
nothing of it, and no draft is pruned: what they propose costs and brings what it would if the
target said the text by itself. Without this, a small model's speed on edits and quotations cannot
be measured, because it does not quote.

Contract: a `TextForm`, which is given as `SamplingParams.structure`. Behind the text's end, and
behind a draft that has left it, every id is allowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from processors.grammar import Bits, Path
from specrouter.request.params import RequestError


@dataclass(frozen=True, eq=False)
class RecordedText:
    """The ids, each below `vocab_size`."""

    token_ids: Path
    vocab_size: int

    def start(self) -> "RecordedRow":
        """For one row."""
        return RecordedRow(self)

    def check(self, generated: Sequence[int]) -> None:
        """Raises `RequestError` unless the recorded text begins with these ids."""
        for place, token in enumerate(generated[: len(self.token_ids)]):
            if token != self.token_ids[place]:
                raise RequestError("generated", f"the recorded text has another token {place + 1}")


class RecordedRow:
    """`processors.grammar.TokenGrammar` of one row; for one thread."""

    binds_drafts = False

    def __init__(self, recorded: RecordedText) -> None:
        self._recorded = recorded
        self._said = 0  # tokens of it

    def advance(self, tokens: list[int]) -> None:
        """See `TokenGrammar`."""
        self._said += len(tokens)

    def mask(self, path: Path) -> Bits | None:
        """See `TokenGrammar`."""
        ids, place = self._recorded.token_ids, self._said + len(path)
        if place >= len(ids) or path != ids[self._said : place]:
            return None
        bits: Bits = np.zeros(-(-self._recorded.vocab_size // 8), dtype=np.uint8)
        bits[ids[place] // 8] = 1 << ids[place] % 8
        return bits
