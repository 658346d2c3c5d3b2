"""GrammarMasks: the ids that the grammars of rows allow at the places of their trees.

Contract: only verifiers are masked; drafters ignore grammars. A grammar that fails allows nothing
where it failed, which concerns its own row alone.
"""

import numpy as np

from processors.errors import RowFault
from processors.grammar import Bits, GrammarError, Path, TokenGrammar
from processors.sampling_row import SamplingRow
from processors.token_tree import Ints


class GrammarMasks:
    """Grammars of the open rows, and their masks.

    `errors` takes each row's first error, and may have errors from elsewhere.

    Attributes:
        by_row: the grammars of rows that have one, advanced by the rows' output.
    """

    def __init__(self, vocab_size: int, errors: dict[int, Exception]) -> None:
        self._vocab_size = vocab_size
        self._errors = errors
        self._rows: dict[int, SamplingRow] = {}
        self.by_row: dict[int, TokenGrammar] = {}

    def open(self, row: int, opened: SamplingRow, output: list[int]) -> None:
        self.close(row)
        grammar = opened.settings.grammar
        if grammar is not None:
            grammar.advance(output)
            self.by_row[row], self._rows[row] = grammar, opened

    def extend(self, row: int, tokens: list[int]) -> None:
        if row in self.by_row:
            self.by_row[row].advance(tokens)

    def close(self, row: int) -> None:
        self.by_row.pop(row, None)
        self._rows.pop(row, None)

    def at(
        self, rows: Ints, positions: Ints, depths: Ints, paths: Ints, of_target: bool = True
    ) -> Bits | None:
        """Return the masks at n places, [n, ceil(V / 8)]; None if no row has a grammar.

        Every id is allowed in a row without a grammar, and after a path that no text has. `rows`,
        `positions` and `depths` are [n] as in `Contexts`; `paths` are [n, L] on the host. Unless
        the places are `of_target`, only grammars that bind drafts count.
        """
        numbers = rows.tolist()
        counting = {row for row, one in self.by_row.items() if of_target or one.binds_drafts}
        restrained = [index for index, row in enumerate(numbers) if row in counting]
        if not restrained:
            return None
        masks: Bits = np.full((len(rows), -(-self._vocab_size // 8)), 255, dtype=np.uint8)
        found = {index: tuple(paths[index, : depths[index]].tolist()) for index in restrained}
        for index in sorted(restrained, key=lambda index: (numbers[index], found[index])):
            masks[index] = self._mask(numbers[index], found[index], int(positions[index]))
        return masks

    def _mask(self, row: int, path: Path, position: int) -> Bits | int:
        try:
            return self._found(row, path, position)
        except GrammarError as error:
            self._errors.setdefault(row, error)
        except Exception as error:
            reason = f"the structure could not be followed: {type(error).__name__}: {error}"
            self._errors.setdefault(row, RowFault(reason))
        return 0

    def _found(self, row: int, path: Path, position: int) -> Bits | int:
        mask = self.by_row[row].mask(path)
        if mask is None:
            return 255
        if position < self._rows[row].settings.min_tokens:
            going_on = mask & ~self._rows[row].end_bits
            return going_on if going_on.any() else mask
        return mask
