"""Drafter: a member of a chain that drafts for its target.

Contract: a new kind is one file with a subclass, and its source in `KINDS`, or in a configuration
`source: drafter:package.module:NAME`. What a drafter does wrong costs its group the
draft of a cycle, and the drafter a rest. It is told of committed tokens only: whatever it keeps of
its own drafts it forgets by itself. All is called by the engine's thread, between its forwards.

Not here: verification by intermediates (`ChainDrafter`), and when a drafter is used (policies).
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

import numpy as np
from torch import Tensor

from modelpool import ConfigError
from modelpool.config import NGRAM, SUFFIX
from modelpool.forward import HiddenLayers
from processors import ActiveModel, DraftProcessor, DraftResult
from specrouter.cycle import CATCH_UP_TOKENS, Ints
from specrouter.execution.group_draft import GroupDraft
from specrouter.execution.runtime_parts import RuntimeParts
from specrouter.request.spec import RequestSpec
from statemgr import OutputStore

# By the sources of members that have no model, where their kinds are.
KINDS: Mapping[str, str] = {
    NGRAM: "specrouter.execution.text_drafter:TextDrafter",
    SUFFIX: "specrouter.execution.text_drafter:SuffixDrafter",
}
_MODEL = "specrouter.execution.drafter:ModelDrafter"
Quoted = tuple[int, float]  # a token and its probability after those before it


class Drafter:
    """Attributes:
    hidden: rising indices of the target's hidden states that `feed` brings, see `ForwardOutput`.
    reach: the most tokens that `quote` may be asked for; None: it does not quote.
    outputs: earlier outputs that it quotes, of other requests too: nobody is told what of them it
        proposed in vain.
    """

    hidden: HiddenLayers = ()
    reach: int | None = None
    outputs: OutputStore | None = None

    def __init__(self, name: str, runtime: RuntimeParts) -> None:
        self.name = name
        self._runtime = runtime

    @property
    def is_open(self) -> bool:
        """Whether it could draft at once, without `prepare`."""
        return True

    def prepare(self) -> None:
        """Loads and times what it needs; the target is loaded."""

    def open(self, row: int, request: RequestSpec) -> None:
        """A row begins, none of whose tokens were fed."""

    def close(self, row: int) -> None:
        """A row ends, be it open or not; its committed tokens are still there."""

    def lag(self, rows: Ints) -> Ints:
        """[R] committed tokens that are to be read before it drafts, the last one not counted."""
        return np.zeros_like(rows)

    def feed(self, rows: Ints, tokens: Ints, positions: Ints, hidden: Tensor) -> None:
        """Committed tokens that the target has read, those of prompts too; where this fails they
        are not told again.

        Args:
            rows, tokens, positions: [n] each; of a row in rising order.
            hidden: [n, layers, H], of `hidden`, what the target made of them.
        """

    def draft(self, draft: GroupDraft) -> DraftResult:
        """Trees for `draft.request`; rows without nodes decode with the target alone.

        Its time is told, per level: one pass for k levels takes a k-th of it
        (`PerformanceProfiler.record_forward`).
        """
        raise TypeError(f"{type(self).__name__} has no method draft")

    def quote(self, row: int, position: int, most: int, least: float) -> list[Quoted]:
        """What one with a `reach` drafts in next to no time: the tokens that most probably follow,
        with the probability of each after those before it. Asked in every cycle.

        Args:
            position: of the first one among the row's output.
            most: tokens.
            least: what is less probable, all tokens of it together, is not verified.
        """
        raise TypeError(f"{type(self).__name__} has a reach and no method quote")


def create_drafters(runtime: RuntimeParts) -> dict[str, Drafter]:
    """Of all members but the target, by name. Raises `ConfigError`."""
    pool, found = runtime.pool, dict[str, Drafter]()
    for index, model in enumerate(pool.config.models):
        if model.name in pool.names and model.name != pool.target:
            address = _MODEL if model.has_model else KINDS.get(model.source, model.own_drafter)
            found[model.name] = _kind(address, f"pool.models[{index}].source")(model.name, runtime)
    return found


def _kind(address: str, field: str) -> type[Drafter]:
    module, _, name = address.partition(":")
    try:
        kind: type[Drafter] = getattr(import_module(module), name)
        if not issubclass(kind, Drafter):
            raise TypeError(f"{name} is no subclass of {Drafter.__module__}.Drafter")
        if kind.draft is Drafter.draft:
            raise TypeError(f"{name} has no method draft")
    except Exception as error:  # what an import runs may fail in any way
        raise ConfigError(field, f"{type(error).__name__}: {error}") from error
    return kind


class EvictedError(Exception):
    """A model was evicted in the midst of the cycle. That is no fault of its own."""


class ModelDrafter(Drafter):
    """A model of the pool drafts, the target's quantised twin among them."""

    def __init__(self, name: str, runtime: RuntimeParts) -> None:
        super().__init__(name, runtime)
        self._states = runtime.states
        self._draft = DraftProcessor(runtime.sampler)

    @property
    def is_open(self) -> bool:
        return self._states.is_open(self.name)

    def prepare(self) -> None:
        self._states.prepare(self.name)

    def lag(self, rows: Ints) -> Ints:
        return self._states.lag(self.name, rows)

    def draft(self, draft: GroupDraft) -> DraftResult:
        request = draft.request
        with self._states.stage(self.name, request.rows) as active:
            check_read(active, draft)
            started = time.perf_counter()
            result = self._draft.draft(active, request)
            places, steps = len(request.rows) * request.width, int(request.depths.max())
            self._runtime.record_stage("draft", places, started, times=steps)
            self._states.touch(active.state, request.rows, result.fed)
        # Places of the beam that hold no token are no nodes.
        tree = result.tree.select(request.depths * request.width, request.depths)
        return replace(result, tree=tree)


def check_read(active: ActiveModel, draft: GroupDraft) -> None:
    """The last tokens are read with the draft. Raises `EvictedError` where there are more."""
    behind = int(active.lag(draft.rows).max(initial=0))
    if behind > CATCH_UP_TOKENS:
        raise EvictedError
    draft.caught_up |= behind > 2
