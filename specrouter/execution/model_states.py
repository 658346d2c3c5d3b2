"""ModelStates: the models in use and their KV states, through a cycle and its failures.

Contract: a model is used inside `stage`, which loads it and opens its state; what goes wrong there
is put down to the model, as a `StageError`. What a stage has added to a state is told by `touch`,
and `settle` leaves of it what was committed, whatever happened in between.

Not here: what models compute, and what a failure costs the requests.
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
    """A model failed, or could not be had."""

    def __init__(self, model: str, error: Exception) -> None:
        super().__init__(model)
        self.failure = ModelFailure(model, error)


@contextmanager
def put_down_to(model: str) -> Iterator[None]:
    """What goes wrong inside is the model's."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        raise StageError(model, error) from error


@dataclass(frozen=True, eq=False)
class _Touched:
    """Rows of a state that a cycle has added to."""

    state: ModelState
    rows: Ints
    fed: FedTree | None  # None: nothing of it is of use


class ModelStates:
    """Args:
    guard: told of every forward of a model other than the target.
    faults: around what models keep of a cycle.
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
        self.hidden: HiddenLayers = ()  # of the target, that drafters read
        self._rollback = RollbackProcessor()
        self._loaded: dict[str, PackedModel] = {}  # the models that the states belong to
        self._touched: list[_Touched] = []  # in this cycle
        self._bases = manager.counts.copy()  # committed tokens before this cycle, by row

    # Through a cycle

    @contextmanager
    def cycle(self) -> Iterator[None]:
        """A cycle: what is committed at its beginning is where its models go back to, and at its
        end they keep what was committed in it."""
        self.begin()
        try:
            yield
        finally:
            self.settle()

    def begin(self) -> None:
        """A cycle begins, which `settle` ends."""
        self._bases = self._manager.counts.copy()
        self._touched = []

    @contextmanager
    def stage(self, name: str, rows: Ints) -> Iterator[ActiveModel]:
        """A model in use for `rows`, with its state. Raises `StageError` for what goes wrong."""
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
                for row in broken.tolist():  # its keys and values may be no numbers either
                    state.free(row)
                self.touch(state, rows, None)
            raise StageError(name, error) from error

    def touch(self, state: ModelState, rows: Ints, fed: FedTree | None) -> None:
        """A stage has added `fed` to these rows of a state; None: nothing of it is of use."""
        self._touched.append(_Touched(state, rows, fed))

    def settle(self) -> None:
        """Every model that took part keeps what was committed, and nothing else. Where it cannot be
        told what of a cycle's tokens was committed, the model reads those again."""
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
        """Whether a model can be used at once: it has run, and is still held."""
        return name in self._loaded and self._pool.is_loaded(name)

    def prepare(self, name: str) -> None:
        """Loads a model and takes its times, or finds those that were kept of it."""
        with self.stage(name, np.zeros(0, dtype=np.int64)):
            pass

    def forget_evicted(self) -> None:
        """Frees the caches of models that the pool no longer holds."""
        for name in [name for name in self._loaded if not self._pool.is_loaded(name)]:
            self._drop(name)

    def slots_of(self, rows: Ints) -> Ints:
        """[R] keys that a query of each row reads, in whole steps."""
        lengths = self._manager.counts[rows] + CATCH_UP_TOKENS
        padded: Ints = -(-lengths // CONTEXT_STEP) * CONTEXT_STEP
        return padded

    def slots_for(self, tokens: int) -> int:
        """The same of a row with so many tokens."""
        return -(-(tokens + CATCH_UP_TOKENS) // CONTEXT_STEP) * CONTEXT_STEP

    def lag(self, name: str, rows: Ints) -> Ints:
        """[R] committed tokens that a model has not read, the last one not counted."""
        state = self._manager.state(name)
        unread = self._manager.counts[rows] - 1
        return unread if state is None else unread - state.lengths(rows)

    def _make_room(self, name: str) -> None:
        """What is evicted is gone before the model is loaded, its KV memory included."""
        if not self._pool.is_loaded(name):
            self._pool.make_room(name)
            self.forget_evicted()

    def _drop(self, name: str) -> None:
        """Forgets a model and its cache, of which nothing is left to settle either."""
        state = self._manager.state(name)
        self._touched = [touched for touched in self._touched if touched.state is not state]
        self._manager.drop_state(name)
        self._loaded.pop(name, None)

    def _open(self, name: str, model: PackedModel) -> ModelState:
        if self._loaded.get(name) is not model:  # evicted and loaded again, maybe elsewhere
            self._drop(name)
            is_target = name == self._pool.target
            around = nullcontext if is_target else partial(self._guard.inside, name)
            model.watch = lambda _tokens, _attended: around()  # its profile may hang, too
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
