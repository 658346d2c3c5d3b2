"""Pure tests: numbers in, numbers out. `pytest --fast` runs these alone, as `make fast` does.

There is no list of them to keep. Every test starts; one that comes to build or load a model, or
to start another process, is skipped at that moment, and so is one that is marked `slow`, `gpu` or
`exact`. Properties are tried on fewer examples. `make test` runs every test to its end.
"""

import subprocess
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from hypothesis import settings

HELP = "skip tests that are marked slow, load a model or start a process"
LONG_MARKS = ("slow", "gpu", "exact", "timing", "long")
FAST_PROFILE = "fast"
MAX_EXAMPLES = 10  # of a property that asks for no number of its own


def few(count: int) -> int:
    """Of so many random cases: in the fast lane a tenth."""
    return count // 10 if settings.get_current_profile_name() == FAST_PROFILE else count


def skip_what_takes_long(patch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    patch.setattr(PreTrainedModel, "__init__", _skip("loads a model"))
    for process, start in ((subprocess.Popen, "__init__"), (BaseProcess, "start")):
        patch.setattr(process, start, _skip("starts a process"))


def _skip(what: str) -> Any:
    """`Skipped` is no `Exception`, so what handles errors lets it through."""

    def stop(*_: object, **__: object) -> None:
        pytest.skip(what)

    return stop
