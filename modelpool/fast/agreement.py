"""Agreement: which forwards of a model in blocks agreed with its ordinary one, for later starts.

Comparing them takes some fifteen passes, a third of the start of a large model. The key names the
file, the configuration, the CPU, the libraries and this package's own sources, so that a change of
any of them compares again.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from modelpool.checkpoint.cache_dir import cache_dir
from modelpool.checkpoint.json_cache import JsonCache
from modelpool.config import ModelConfig
from modelpool.fast.model_key import computing_facts
from modelpool.fast.tuning import Tuning


class Agreement(NamedTuple):
    """The forwards that agreed; `direct`: to the bit."""

    direct: bool
    lean: bool

    @classmethod
    def of_json(cls, kept: Any) -> "Agreement":
        """Return what `_asdict` has made; raise an exception for anything else."""
        direct, lean = kept["direct"], kept["lean"]
        if not (isinstance(direct, bool) and isinstance(lean, bool)):
            raise ValueError("no agreement")
        return cls(direct, lean)


class KeptAgreement:
    """The agreement of one model in the cache; `directory` describes its file, and names it."""

    def __init__(self, config: ModelConfig, directory: Path, tuning: Tuning) -> None:
        facts = (
            *(directory.name, config.model_dump_json(exclude={"name"})),
            *(tuning.threads, tuning.pack_weights, tuning.weights, tuning.kv_dtype),
            *(tuning.attention.name, tuning.is_target),
            *computing_facts(),
        )
        self._key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
        self._cache = JsonCache(cache_dir() / "agreements", "agreement")

    def load(self) -> Agreement | None:
        return self._cache.load(self._key, Agreement.of_json)

    def store(self, found: Agreement) -> None:
        self._cache.store(self._key, found._asdict())
