"""State: KV memory, cache masks, rows and slots. Knows neither requests nor acceptance."""

from statemgr.forward_view import ForwardView
from statemgr.kv_store import KVStore, LayerShape
from statemgr.model_state import ModelState
from statemgr.state_manager import StateManager

__all__ = ["ForwardView", "KVStore", "LayerShape", "ModelState", "StateManager"]
