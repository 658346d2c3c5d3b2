"""State of the models: KV memory, cache masks, rows and slots, without requests or acceptance."""

from statemgr.blocks import BLOCK_SLOTS, NoFreeBlocksError
from statemgr.forward_view import ForwardView
from statemgr.kv_store import KVStore
from statemgr.model_state import ModelState
from statemgr.output_store import OutputStore
from statemgr.prefix_cache import CacheCounts, CacheUse, TokenChain
from statemgr.recurrent_store import KEPT_STATES, TokenOrder
from statemgr.row_kv import KVFormat, KVMismatchError, RowKV, check_kv, export_row, import_row
from statemgr.state_manager import GROWTH_TOKENS, StateManager, row_slots, row_tokens
from statemgr.suffix_table import SuffixTable

__all__ = [
    "BLOCK_SLOTS",
    "GROWTH_TOKENS",
    "KEPT_STATES",
    "CacheCounts",
    "CacheUse",
    "ForwardView",
    "KVFormat",
    "KVMismatchError",
    "KVStore",
    "ModelState",
    "NoFreeBlocksError",
    "OutputStore",
    "RowKV",
    "StateManager",
    "SuffixTable",
    "TokenChain",
    "TokenOrder",
    "check_kv",
    "export_row",
    "import_row",
    "row_slots",
    "row_tokens",
]
