"""State: KV memory, cache masks, rows and slots. Knows neither requests nor acceptance."""

from statemgr.forward_view import ForwardView, TreeMask
from statemgr.key_paths import TreePaths
from statemgr.kv_store import KVStore, LayerShape
from statemgr.model_state import ModelState
from statemgr.ngram_table import NgramTable
from statemgr.prefix_cache import CacheCounts, CacheUse, TokenChain
from statemgr.state_manager import StateManager, row_slots, row_tokens

__all__ = [
    "CacheCounts",
    "CacheUse",
    "ForwardView",
    "KVStore",
    "LayerShape",
    "ModelState",
    "NgramTable",
    "StateManager",
    "TokenChain",
    "TreeMask",
    "TreePaths",
    "row_slots",
    "row_tokens",
]
