"""LoadedModels: the models in memory, their use, and eviction when there is no room.

Contract: under the pool's limits the least recently used model that is not held is evicted; the
target, pinned models and models in use never are. The target may always be loaded. Thread-safe.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING

from modelpool.config import PoolConfig
from modelpool.errors import PoolFullError
from modelpool.placed_members import PlacedMembers

if TYPE_CHECKING:
    from modelpool.packed_model import PackedModel

logger = logging.getLogger(__name__)

_MIB = 2**20


class LoadedModels:
    def __init__(self, config: PoolConfig, members: PlacedMembers) -> None:
        self._config = config
        self._members = members
        self._lock = threading.Lock()  # guards the two below
        self._loaded: OrderedDict[str, PackedModel] = OrderedDict()  # least recently used first
        self._uses: Counter[str] = Counter()

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._loaded

    def touch(self, name: str, hold: bool) -> "PackedModel | None":
        """Return a model if it is loaded, and mark it as used; `hold`: until it is released."""
        with self._lock:
            model = self._loaded.get(name)
            if model is not None:
                self._loaded.move_to_end(name)
                self._uses[name] += hold
            return model

    def add(self, name: str, model: "PackedModel", hold: bool) -> None:
        with self._lock:
            self._loaded[name] = model
            self._uses[name] += hold

    def release(self, name: str) -> None:
        with self._lock:
            assert self._uses[name] > 0, f"{name} is released more often than acquired"
            self._uses[name] -= 1

    def evict(self, name: str) -> bool:
        """Drop an idle model's weights; return False if it is not loaded, in use, or kept."""
        with self._lock:
            if name not in self._loaded or not self._may_evict(name):
                return False
            self._drop(name)
            return True

    def fit(self, names: Collection[str]) -> bool:
        """Return whether these models, and no others, would be within the pool's limits."""
        limit, memory = self._config.max_loaded_models, self._config.memory_limit_mb
        if limit is not None and len(names) > limit:
            return False
        return memory is None or sum(map(self._members.bytes_of, names)) <= memory * _MIB

    def has_room(self, name: str) -> bool:
        """Return whether it is loaded, or could be without evicting another model."""
        with self._lock:
            return name in self._loaded or not self._is_full_for(name)

    def make_room(self, name: str) -> None:
        """Evict models, least recently used first, until `name` fits, or raise `PoolFullError`."""
        with self._lock:
            while name not in self._loaded and self._is_full_for(name):
                idle = next((other for other in self._loaded if self._may_evict(other)), None)
                if idle is not None:
                    self._drop(idle)
                elif name == self._config.target:
                    return
                else:
                    loaded = ", ".join(self._loaded)
                    raise PoolFullError(f"no room to load {name}: in use or pinned are {loaded}")

    def _is_full_for(self, name: str) -> bool:
        return not self.fit({*self._loaded, name})

    def _may_evict(self, name: str) -> bool:
        kept = name == self._config.target or self._members[name].config.pinned
        return not kept and self._uses[name] == 0

    def _drop(self, name: str) -> None:
        del self._loaded[name]
        logger.info("evicted %s", name)
