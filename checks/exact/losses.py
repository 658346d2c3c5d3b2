"""Models whose keys and values are lost between cycles, at random: evicted, given up or resting."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np

from specrouter import ChainRouter
from specrouter.cycle import ModelFailure


@contextlib.contextmanager
def losing_models(router: ChainRouter, share: float) -> Iterator[Counter[str]]:
    """Before each cycle, with this chance, a model loses its state; its weights go with it, or it
    rests as after a failure, in turn. Every invariant of all states is checked after each loss.

    Yields what was lost how often: `evicted`, `rested` or `given up`, and the model.
    """
    engine, lost = router.instruments.engine, Counter[str]()
    pool, manager = engine._pool, engine._manager
    states, draws = engine._executor.states, np.random.default_rng(7)
    names = list(pool.models)
    follow = engine.book.follow

    def lose() -> str:
        name = names[int(draws.integers(len(names)))]
        if draws.random() < 0.5 and pool.evict(name):
            states.forget_evicted()
            return f"evicted {name}"
        if name != pool.target:
            engine._quarantine.add(ModelFailure(name, RuntimeError("lost")), engine.steps.cycle)
            states._drop(name)
            return f"rested {name}"
        states._drop(name)
        return f"given up {name}"

    def lose_and_follow() -> None:
        if draws.random() < share:
            lost[lose()] += 1
            manager.check_integrity()
        follow()
        manager.check_integrity()

    with patch.object(engine.book, "follow", lose_and_follow):
        yield lost
