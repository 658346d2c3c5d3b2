"""What is wrong with a pool's sources, told before PyTorch is imported, which takes seconds.

Contract: names, folders and the headers of GGUF files are looked at. A pool looks at them again,
and at all else: what is fine here may be refused there.
"""

from __future__ import annotations

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from modelpool.checkpoint.source import resolve_description, resolve_source
from modelpool.config import PoolConfig
from modelpool.errors import ConfigError
from modelpool.gguf.header import is_gguf, open_header


def check_sources(pool: PoolConfig) -> None:
    """Raises `ConfigError` for the first `source` that is not there, or of another kind."""
    for index, model in enumerate(pool.models):
        if model.is_placed:
            field = f"pool.models[{index}]"
            check_source(model.source, field=field, revision=model.revision)


def check_source(source: str, *, field: str, revision: str | None = None) -> None:
    """Raises `ConfigError` for `{field}.source`."""
    if is_gguf(source):
        try:
            open_header(source)
        except ConfigError as error:
            raise ConfigError(f"{field}.source", error.reason) from error
    elif not source.startswith("hub:") or constants.HF_HUB_OFFLINE:
        resolve_source(source, field=field, revision=revision)
    elif not _is_cached(source.removeprefix("hub:"), revision):
        # Does the hub have it? What is fetched here is needed later.
        resolve_description(source, field=field, revision=revision)


def _is_cached(repository: str, revision: str | None) -> bool:
    """At least its configuration."""
    try:
        found = try_to_load_from_cache(repository, "config.json", revision=revision)
    except HFValidationError:  # which asking for it tells better
        return False
    return isinstance(found, str)
