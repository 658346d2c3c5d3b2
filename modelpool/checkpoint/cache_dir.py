"""Where this program keeps what it can make again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$SPECROUTER_CACHE`, else `$XDG_CACHE_HOME/specrouter`, else `~/.cache/specrouter`.

    It need not exist. Raises `RuntimeError` where it would be in a home that cannot be found.
    """
    own, shared = os.environ.get("SPECROUTER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().absolute()
    if shared and Path(shared).is_absolute():  # a relative one is to be ignored, says its standard
        return Path(shared) / "specrouter"
    return Path.home() / ".cache" / "specrouter"
