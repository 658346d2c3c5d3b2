"""ActiveModel: a loaded model, its KV state, and the committed tokens that the state follows."""

from dataclasses import dataclass

from modelpool.forward import HiddenLayers
from modelpool.packed_model import PackedModel
from processors.token_tree import Ints
from statemgr import ModelState, StateManager


@dataclass(frozen=True, eq=False)
class ActiveModel:
    """What every forward of a cycle needs, while the model is held."""

    model: PackedModel
    state: ModelState
    manager: StateManager
    hidden: HiddenLayers = ()  # that drafters read of it

    def lag(self, rows: Ints) -> Ints:
        """[R] committed tokens that the state lacks, the last one not counted."""
        missing: Ints = self.manager.counts[rows] - 1 - self.state.lengths(rows)
        return missing
