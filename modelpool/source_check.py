"""Check of a pool's sources before PyTorch is imported, which takes seconds.

Contract: only names, folders and the headers of GGUF files are checked. A pool checks them again,
and all else: a source that passes here may be refused there.
"""

from __future__ import annotations

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from modelpool.checkpoint.released import SCHEME, find_released
from modelpool.checkpoint.source import resolve_description, resolve_source
from modelpool.config import PoolConfig
from modelpool.errors import ConfigError
from modelpool.gguf.header import is_gguf, path_of, read_header
from modelpool.gguf.hub import find_gguf, tag_in


def check_sources(pool: PoolConfig) -> None:
    """Raise `ConfigError` for the first `source` that is not there, or of another kind."""
    for index, model in enumerate(pool.models):
        if model.is_placed:
            field = f"pool.models[{index}]"
            check_source(model.source, field=field, revision=model.revision)


def check_source(source: str, *, field: str, revision: str | None = None) -> None:
    """Raise `ConfigError` for a `{field}.source` that is not there, or of another kind."""
    if is_gguf(source):
        try:
            read_header(path_of(source))
        except ConfigError as error:
            raise ConfigError(f"{field}.source", error.reason) from error
    elif source.startswith(SCHEME):
        find_released(source, field)
    elif source.startswith("hub:"):
        _check_hub(source, field, revision)
    else:
        resolve_source(source, field=field, revision=revision)


def _check_hub(source: str, field: str, revision: str | None) -> None:
    """Check that the hub has the source, or offline the local cache.

    Files that are fetched here are needed later.
    """
    tag, is_offline = tag_in(source), constants.HF_HUB_OFFLINE
    if tag is None and not is_offline and _is_cached(source.removeprefix("hub:"), revision):
        return
    if tag or resolve_description(source, field=field, revision=revision) is None:
        find_gguf(source, field=field, revision=revision)
    elif is_offline:
        resolve_source(source, field=field, revision=revision)


def _is_cached(repository: str, revision: str | None) -> bool:
    """Return whether at least its configuration is in the cache."""
    try:
        found = try_to_load_from_cache(repository, "config.json", revision=revision)
    except HFValidationError:  # the hub's answer reports it better
        return False
    return isinstance(found, str)
