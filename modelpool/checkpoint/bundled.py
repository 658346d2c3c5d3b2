"""The models that came with this package."""

from importlib import resources
from pathlib import Path


def bundled_names() -> tuple[str, ...]:
    """The names that `bundled:` accepts."""
    root = bundled_root()
    if not root.is_dir():
        return ()
    return tuple(sorted(entry.parent.name for entry in root.glob("*/config.json")))


def bundled_root() -> Path:
    return Path(str(resources.files("modelpool") / "bundled"))
