"""RollbackProcessor: after a cycle, every model keeps what was committed and forgets the rest.

It compares the trees that a model was fed with the committed tokens, so it needs no account of who
drafted or accepted what. The last committed token is forgotten with the rest: the next forward
writes its key and value. Stateless.
"""

from collections.abc import Sequence

import numpy as np

from processors.pack import NO_SLOT, FedTree
from processors.token_tree import Ints
from statemgr import ModelState, StateManager

NOTHING: Ints = np.zeros(0, dtype=np.int64)


class RollbackProcessor:
    def kept(self, manager: StateManager, rows: Ints, bases: Ints, fed: Sequence[FedTree]) -> Ints:
        """[K] flat slots of the nodes that were committed. Changes nothing.

        Args:
            bases: [R] committed tokens of each row before the cycle.
            fed: what the state was fed beyond them, each of some of the rows; no row twice.
        """
        counts = manager.counts[rows]
        slots = [NOTHING]
        for one in fed:
            mine = np.searchsorted(rows, one.tree.rows)
            # The node at depth k stands for the committed token k; the last one is not kept.
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
        """Leaves what was committed before the cycle, and `kept` [K] of what was fed in it. What is
        missing of the text is read again.

        Args:
            bases: as of `kept`.
        """
        state.commit(rows, np.minimum(bases, manager.counts[rows] - 1), kept)
