"""RollbackProcessor: lets every model keep what a cycle committed, and forget the rest.

It compares the trees that a model was fed with the committed tokens, so it does not depend on which
model drafted or accepted them. The last committed token is forgotten too: the next forward writes
its key and value. The processor has no state.
"""

from collections.abc import Sequence

import numpy as np

from processors.pack import NO_SLOT, FedTree
from processors.token_tree import Ints
from statemgr import ModelState, StateManager

NOTHING: Ints = np.zeros(0, dtype=np.int64)


class RollbackProcessor:
    def kept(self, manager: StateManager, rows: Ints, bases: Ints, fed: Sequence[FedTree]) -> Ints:
        """Return the flat slots, [K], of the nodes that were committed, and change nothing.

        `bases`, [R], are the committed tokens of each row before the cycle. `fed` are the trees
        that the state was fed after them, each for some of the rows; no row occurs twice.
        """
        counts = manager.counts[rows]
        slots = [NOTHING]
        for one in fed:
            mine = np.searchsorted(rows, one.tree.rows)
            # The node at depth k is the cycle's k-th committed token; the last one is not kept.
            fresh = counts[mine] - 1 - bases[mine]
            index = bases[mine][:, None] + np.arange(max(0, int(fresh.max(initial=0))))
            texts = manager.tokens[one.tree.rows[:, None], np.minimum(index, manager.slots - 1)]
            good = one.tree.on_text(texts, fresh) & (one.flat_slots != NO_SLOT)
            slots.append(one.flat_slots[good])
        return np.concatenate(slots)

    def rollback(
        self,
        state: ModelState,
        manager: StateManager,
        rows: Ints,
        bases: Ints,
        kept: Ints = NOTHING,
    ) -> None:
        """Keep what was committed before the cycle, and `kept` [K] of what was fed in it.

        Missing tokens of the text are read again later. `bases` are as in `kept`.
        """
        state.commit(rows, np.minimum(bases, manager.counts[rows] - 1), kept)
