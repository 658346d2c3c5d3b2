"""The interface of drafters, the first members of chains, and the drafter that is a model.

Contract: a new kind is one file with a subclass, and its source in `KINDS`, or in a configuration
`source: drafter:package.module:NAME`. After an error, its group decodes one cycle without a draft,
and the drafter rests. It is given committed tokens only, and has to discard any state of its own
drafts itself. All methods are called in the engine's thread, between forwards.

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

# Addresses of the classes of members without a model, by their source.
KINDS: Mapping[str, str] = {
    NGRAM: "specrouter.execution.text_drafter:TextDrafter",
    SUFFIX: "specrouter.execution.text_drafter:SuffixDrafter",
}
_MODEL = "specrouter.execution.drafter:ModelDrafter"
Quoted = tuple[int, float]  # a token and its probability after those before it


class Drafter:
    """A member of a chain that drafts for its target.

    Attributes:
        hidden: ascending indices of the target's hidden states that `feed` gets, see
            `ForwardOutput`.
        reach: the most tokens that `quote` may be asked for; None: it has no `quote`.
        outputs: earlier outputs that it proposes from, of other requests too; tokens of them that
            were rejected must not be revealed.
    """

    hidden: HiddenLayers = ()
    reach: int | None = None
    outputs: OutputStore | None = None

    def __init__(self, name: str, runtime: RuntimeParts) -> None:
        self.name = name
        self._runtime = runtime

    @property
    def is_open(self) -> bool:
        """True if it can draft at once, without `prepare`."""
        return True

    def prepare(self) -> None:
        """Load and time what it needs; the target is loaded already."""

    def open(self, row: int, request: RequestSpec) -> None:
        """Begin a row; none of its tokens were fed."""

    def close(self, row: int) -> None:
        """End a row, open or not; its committed tokens can still be read."""

    def lag(self, rows: Ints) -> Ints:
        """Return [R]: committed tokens to read before it can draft, without the last one."""
        return np.zeros_like(rows)

    def feed(self, rows: Ints, tokens: Ints, positions: Ints, hidden: Tensor) -> None:
        """Take committed tokens that the target has read, prompts included.

        After an error they are not given again.

        Args:
            rows: [n] the row of each token.
            tokens: [n] token ids.
            positions: [n] positions in the texts, ascending in each row.
            hidden: [n, layers, H] the target's hidden states that the attribute `hidden` names.
        """

    def draft(self, draft: GroupDraft) -> DraftResult:
        """Return trees for `draft.request`; rows without nodes decode with the target alone.

        It has to record its time per level: a pass that drafts k levels counts as k forwards
        (`PerformanceProfiler.record_forward`).
        """
        raise TypeError(f"{type(self).__name__} has no method draft")

    def quote(self, row: int, position: int, most: int, least: float) -> list[Quoted]:
        """Return the tokens that most probably follow, each with its conditional probability.

        For drafters with a `reach`; it is called in every cycle, and has to be very fast.

        Args:
            row: the row to propose for.
            position: position of the first proposed token in the row's output.
            most: most tokens to return.
            least: lowest product of probabilities at which a token may be verified.
        """
        raise TypeError(f"{type(self).__name__} has a reach and no method quote")


def create_drafters(runtime: RuntimeParts) -> dict[str, Drafter]:
    """Return the drafters of all members but the target, by name; may raise `ConfigError`."""
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
    """Error for a model that was evicted during the cycle; it does not count as its failure."""


class ModelDrafter(Drafter):
    """A drafter that is a model of the pool, such as a quantised copy of the target."""

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
        # Remove the beam's places that hold no token.
        tree = result.tree.select(request.depths * request.width, request.depths)
        return replace(result, tree=tree)


def check_read(active: ActiveModel, draft: GroupDraft) -> None:
    """Raise `EvictedError` if rows lag by more tokens than are read together with the draft."""
    behind = int(active.lag(draft.rows).max(initial=0))
    if behind > CATCH_UP_TOKENS:
        raise EvictedError
    draft.caught_up |= behind > 2
