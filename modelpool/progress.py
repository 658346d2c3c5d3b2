"""LoadProgress: the current step until a pool's models can be used, for other threads to read.

Contract: one thread writes, any may read. Importing this module imports nothing that takes long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

logger = logging.getLogger(__name__)

# "reading": configuration and tokenizer; "packing": laying out or quantising weights that are
# loaded; "checking": comparing our forward with transformers', at length when a file is new, and
# compiling kernels if that is still to do; "timing": passes of several sizes.
LoadStage = Literal[
    "starting", "reading", "downloading", "inflating", "loading", "packing", "checking", "timing"
]


@dataclass(frozen=True)
class LoadStep:
    """A step of loading.

    Attributes:
        model: its name in the pool; None if the step concerns no model.
        since_s: its start, of `monotonic`.
        done_bytes, total_bytes: bytes of the model's weights; 0 if they are not counted.
    """

    stage: LoadStage
    model: str | None
    since_s: float
    done_bytes: int = 0
    total_bytes: int = 0

    def __str__(self) -> str:
        """Return a text such as `loading big, 402.3 of 988.1 MB`."""
        doing = self.stage if self.model is None else f"{self.stage} {self.model}"
        if not self.total_bytes:
            return doing
        scale, unit = (1e9, "GB") if self.total_bytes >= 1e9 else (1e6, "MB")
        return f"{doing}, {self.done_bytes / scale:.1f} of {self.total_bytes / scale:.1f} {unit}"


class LoadProgress:
    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._step = LoadStep("starting", None, self._started_s)

    def begin(self, stage: LoadStage, model: str) -> None:
        self._step = LoadStep(stage, model, time.monotonic())
        is_long = stage in ("downloading", "inflating")  # the others are logged when they are done
        logger.log(logging.INFO if is_long else logging.DEBUG, "%s %s", stage, model)

    def count(self, done_bytes: int, total_bytes: int) -> None:
        """Record how much of the step is done."""
        self._step = replace(self._step, done_bytes=done_bytes, total_bytes=total_bytes)

    @property
    def step(self) -> LoadStep:
        return self._step

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s


@contextmanager
def counted_loops(
    progress: LoadProgress, model: str, total_bytes: int, is_mapped: bool
) -> Iterator[None]:
    """Report the progress of loops over `transformers.utils.logging.tqdm` that run within it.

    Their own bars are not shown. The first loop is that of loading a model, later ones that of
    packing it.

    Args:
        progress: records it.
        model: name of the model.
        total_bytes: bytes of its weights.
        is_mapped: transformers maps files without reading them, so its own loop does not count.
    """
    from transformers.utils import logging as transformers_logging

    stages: Iterator[LoadStage] = iter(["loading"])

    def counted(items: Any) -> Iterator[Any]:
        items = list(items)
        progress.begin(next(stages, "packing"), model)
        sizes = [getattr(item, "nbytes", 1) for item in items]
        done, total = 0, max(sum(sizes), 1)
        for item, size in zip(items, sizes, strict=True):
            progress.count(total_bytes * done // total, total_bytes)
            yield item
            done += size
        progress.count(total_bytes, total_bytes)
        progress.begin("checking", model)

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_own = kwargs.get("desc") is None
        if args and (is_own or not is_mapped):
            args = (counted(args[0]), *args[1:])
        return factory(*args, **{**kwargs, "disable": True})

    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
