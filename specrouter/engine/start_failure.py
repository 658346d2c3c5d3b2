"""What to change where the engine cannot start."""

import torch

from modelpool.errors import ConfigError
from specrouter.execution.model_states import StageError


def config_error(error: BaseException) -> ConfigError | None:
    """Where the target is loaded, and memory has run out for its state, or drafters ask of it what
    it does not have; else None."""
    cause = error.__cause__
    if isinstance(error, StageError) and isinstance(cause, ConfigError):
        return cause
    if not isinstance(error, StageError) or not _is_out_of_memory(cause):
        return None
    reason = (
        "no memory for the target's keys and values, or to run it: fewer requests, or a shorter "
        f"engine.max_model_len, need less ({cause})"
    )
    found = ConfigError("engine.max_requests", reason)
    found.__cause__ = error
    return found


def _is_out_of_memory(error: BaseException | None) -> bool:
    """On a CPU torch has no exception of its own for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
