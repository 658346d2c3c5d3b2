"""The models in use and their KV states, in a cycle and after failures.

Contract: a model is used inside `stage`, which loads it and opens its state; an error there becomes
the model's `StageError`. `touch` registers the nodes that a stage has added to a state, and
`settle` keeps the committed ones of them, after failures too.

Not here: the models' computation, and the effect of a failure on requests.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from modelpool import ModelPool
from modelpool.forward import HiddenLayers
from modelpool.packed_model import PackedModel
from processors import ActiveModel, FedTree, NonFiniteLogits, RollbackProcessor
from processors.rollback import NOTHING
from specrouter.cycle import CATCH_UP_TOKENS, CONTEXT_STEP, Ints, ModelFailure
from specrouter.execution.fault_guard import FaultGuard
from specrouter.execution.forward_clock import ForwardClock
from specrouter.execution.hang_guard import HangGuard
from specrouter.execution.model_times import ModelTimes
from statemgr import BLOCK_SLOTS, ModelState, StateManager


class StageError(Exception):
    """Error for a model that failed, or could not be loaded."""

    def __init__(self, model: str, error: Exception) -> None:
        super().__init__(model)
        self.failure = ModelFailure(model, error)


@contextmanager
def put_down_to(model: str) -> Iterator[None]:
    """Raise errors of the enclosed work as the model's `StageError`."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        raise StageError(model, error) from error


@dataclass(frozen=True, eq=False)
class _Touched:
    state: ModelState
    rows: Ints
    fed: FedTree | None  # None: none of the nodes can be used


class ModelStates:
    """The models that are open, with their KV states.

    Args:
        guard: watches every forward of a model other than the target.
        faults: catches failures to find the nodes to keep.
    """

    def __init__(
        self,
        pool: ModelPool,
        manager: StateManager,
        times: ModelTimes,
        clock: ForwardClock,
        guard: HangGuard,
        faults: FaultGuard,
    ) -> None:
        self._pool = pool
        self._manager = manager
        self._times = times
        self._clock = clock
        self._guard = guard
        self._faults = faults
        self.hidden: HiddenLayers = ()  # the target's layers whose hidden states drafters read
        self._rollback = RollbackProcessor()
        self._loaded: dict[str, PackedModel] = {}  # the models that the states belong to
        self._touched: list[_Touched] = []  # in this cycle
        self._bases = manager.counts.copy()  # committed tokens before this cycle, by row

    # Through a cycle

    @contextmanager
    def cycle(self) -> Iterator[None]:
        """Enclose a cycle; at its end, models keep only tokens that are committed."""
        self.begin()
        try:
            yield
        finally:
            self.settle()

    def begin(self) -> None:
        """Begin a cycle, which `settle` ends."""
        self._bases = self._manager.counts.copy()
        self._touched = []

    @contextmanager
    def stage(self, name: str, rows: Ints) -> Iterator[ActiveModel]:
        """Yield a loaded model with its state, for `rows`; raise `StageError` on any failure."""
        state: ModelState | None = None
        try:
            self._make_room(name)
            model = self._pool.acquire(name)
            try:
                state = self._open(name, model)
                hidden = self.hidden if name == self._pool.target else ()
                yield ActiveModel(model, state, self._manager, hidden)
            finally:
                self._pool.release(name)
        except Exception as error:
            if state is not None:
                broken = error.rows if isinstance(error, NonFiniteLogits) else rows[:0]
                for row in broken.tolist():  # its keys and values may have NaN, too
                    state.free(row)
                self.touch(state, rows, None)
            raise StageError(name, error) from error

    def touch(self, state: ModelState, rows: Ints, fed: FedTree | None) -> None:
        """Register the nodes that a stage has added to a state; None: none of them can be used."""
        self._touched.append(_Touched(state, rows, fed))

    def settle(self) -> None:
        """Roll back every model that took part to the committed tokens.

        If the committed ones of a cycle's nodes cannot be found, the model reads those again.
        """
        manager = self._manager
        for touched in self._touched:
            state, rows, kept = touched.state, touched.rows, NOTHING
            bases = self._bases[rows]
            with self._faults.part("rows"):
                fed = () if touched.fed is None else (touched.fed,)
                kept = self._rollback.kept(manager, rows, bases, fed)
            self._rollback.rollback(state, manager, rows, bases, kept)
        self._touched = []

    # Between cycles

    def is_open(self, name: str) -> bool:
        """Return whether a model can be used at once: it has run, and was not evicted."""
        return name in self._loaded and self._pool.is_loaded(name)

    def prepare(self, name: str) -> None:
        """Load a model and time it, or read the times that were kept of it."""
        with self.stage(name, np.zeros(0, dtype=np.int64)):
            pass

    def forget_evicted(self) -> None:
        """Free the KV caches of models that the pool has evicted."""
        for name in [name for name in self._loaded if not self._pool.is_loaded(name)]:
            self._drop(name)

    def slots_of(self, rows: Ints) -> Ints:
        """Return [R]: the keys that a query of each row reads, in multiples of `CONTEXT_STEP`."""
        lengths = self._manager.counts[rows] + CATCH_UP_TOKENS
        padded: Ints = -(-lengths // CONTEXT_STEP) * CONTEXT_STEP
        return padded

    def slots_for(self, tokens: int) -> int:
        """Return the same for a row with `tokens` tokens."""
        return -(-(tokens + CATCH_UP_TOKENS) // CONTEXT_STEP) * CONTEXT_STEP

    def lag(self, name: str, rows: Ints) -> Ints:
        """Return [R]: the committed tokens that a model has not read, without the last one."""
        state = self._manager.state(name)
        unread = self._manager.counts[rows] - 1
        return unread if state is None else unread - state.lengths(rows)

    def _make_room(self, name: str) -> None:
        """Evict models if necessary, and free their KV memory, before a model is loaded."""
        if not self._pool.is_loaded(name):
            self._pool.make_room(name)
            self.forget_evicted()

    def _drop(self, name: str) -> None:
        """Drop a model's KV cache, and its rows that are to be settled."""
        state = self._manager.state(name)
        self._touched = [touched for touched in self._touched if touched.state is not state]
        self._manager.drop_state(name)
        self._loaded.pop(name, None)

    def _open(self, name: str, model: PackedModel) -> ModelState:
        if self._loaded.get(name) is not model:  # loaded again, perhaps on another device
            self._drop(name)
            is_target = name == self._pool.target
            around = nullcontext if is_target else partial(self._guard.inside, name)
            model.watch = lambda _tokens, _attended: around()  # also while it is timed
            self._times.learn(name, model)
            model.watch = self._clock.watch(name, model.device, around)
            if is_target and self.hidden:
                model.check_hidden(self.hidden)
            self._loaded[name] = model
        recurrent = model.recurrent_layers
        is_new = self._manager.state(name) is None
        is_target = name == self._pool.target
        state = self._manager.open_state(name, model.kv_layers, recurrent, is_target)
        if is_new:
            hidden = self.hidden if is_target else ()
            model.prepare(state.store.layer, BLOCK_SLOTS, hidden)
        return state
