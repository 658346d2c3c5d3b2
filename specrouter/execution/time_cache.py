"""TimeCache: the profiles of models, kept on disk for the next start.

Contract: nothing here fails, as in `JsonCache`: a file that is of no use costs a profile.
"""

from pathlib import Path
from typing import Any

from modelpool.checkpoint.json_cache import JsonCache
from specrouter.profile.time_regression import TimeRegression


class TimeCache:
    """One file per key in a folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept = JsonCache(folder, "times")

    def load(self, key: str) -> TimeRegression | None:
        """None where nothing of use is kept; the warning says why, if there is a file."""
        return self._kept.load(key, _times)

    def store(self, key: str, times: TimeRegression) -> None:
        """Readers see the old file or the new one, never a part."""
        self._kept.store(key, times.to_json())


def _times(kept: Any) -> TimeRegression:
    times = TimeRegression.from_json(kept)
    times.curve()  # of what can be read and makes no sense
    return times
