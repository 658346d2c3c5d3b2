"""The models that came with this package."""

from importlib import resources
from pathlib import Path


def bundled_names() -> tuple[str, ...]:
    """The names that `bundled:` accepts."""
    return tuple(sorted(file.parent.name for file in bundled_root().glob("*/config.json")))


def bundled_root() -> Path:
    return Path(str(resources.files("modelpool") / "bundled"))
