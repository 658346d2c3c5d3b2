"""Models that are part of this package."""

from importlib import resources
from pathlib import Path


def bundled_names() -> tuple[str, ...]:
    """Return the names that `bundled:` accepts."""
    return tuple(sorted(file.parent.name for file in bundled_root().glob("*/config.json")))


def bundled_root() -> Path:
    return Path(str(resources.files("modelpool") / "bundled"))
