"""OutputFile: where earlier outputs stand while the service does not run.

A file that cannot be read or written costs speed, never a request and never the start. The log says
so.
"""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpool import ModelPool
from modelpool.checkpoint.cache_dir import expanded
from modelpool.errors import ConfigError
from specrouter.config import EngineConfig
from statemgr import OutputStore

logger = logging.getLogger(__name__)

FIELD = "engine.output_store_file"


@dataclass(frozen=True)
class OutputFile:
    """Args: `fingerprint`: of what tokens mean, see `fingerprint_of_tokens`.

    Raises `ConfigError` where there is no folder to write it into.
    """

    path: Path
    store: OutputStore
    fingerprint: str
    vocab_size: int

    def __post_init__(self) -> None:
        if not self.path.parent.is_dir():
            raise ConfigError(FIELD, f"there is no folder {self.path.parent}")

    def load(self) -> None:
        """What an earlier service has kept, if anything."""
        if not self.path.exists():
            return
        try:
            self.store.load(self.path, self.fingerprint, self.vocab_size)
        except (OSError, ValueError) as error:
            logger.warning("%s: %s is not read: %s", FIELD, self.path, error)

    def save(self) -> None:
        try:
            self.store.save(self.path, self.fingerprint)
        except OSError as error:
            logger.error("%s: %s is not written: %s", FIELD, self.path, error)


def fingerprint_of_tokens(tokenizer: Any) -> str:
    """The same for tokenizers whose ids stand for the same texts."""
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def output_file_of(
    config: EngineConfig, pool: ModelPool, store: OutputStore | None
) -> OutputFile | None:
    """With what it holds read; None where nothing is to be kept. Raises `ConfigError`."""
    if config.output_store_file is None or store is None:
        return None
    path = expanded(config.output_store_file)
    file = OutputFile(path, store, fingerprint_of_tokens(pool.tokenizer), pool.vocab_size)
    file.load()
    return file
