"""How long a model's forward takes by itself: the floor under a chain's time.

Runs on a scratch state, with the pack of a run and nothing of the engine around it.
"""

import statistics
import time

import numpy as np
import torch

from modelpool.packed_model import PackedModel
from specrouter import ChainRouter
from statemgr import StateManager

_WARM_UPS = 2


class BareForwards:
    """Times forwards in the engine's thread, whose OpenMP workers a run would use; each once."""

    def __init__(self, router: ChainRouter, repeats: int = 9) -> None:
        self._router, self._repeats = router, repeats
        self._known: dict[tuple[str, int, int, int], float] = {}

    def ms(self, name: str, pack_tokens: float, batch: int, context: int) -> float:
        """Median time of a forward of `pack_tokens`, rounded, after `context` tokens in each row.

        A member without a model takes no time.
        """
        pool = self._router.pool
        if name in pool.draft_only:
            return 0.0
        pack = max(1, round(pack_tokens))
        key = (name, pack, min(batch, pack), context)
        if key not in self._known:
            self._known[key] = self._router.instruments.run_idle(
                lambda: time_forward(pool.get(name), *key[1:], repeats=self._repeats)
            )
        return self._known[key]


@torch.inference_mode()
def time_forward(
    model: PackedModel, pack_tokens: int, rows: int, context: int, repeats: int
) -> float:
    """Milliseconds, the median. What the rows hold is zeros: the time does not depend on it."""
    numbers = np.arange(rows)
    counts = np.full(rows, pack_tokens // rows)
    counts[: pack_tokens % rows] += 1
    manager = StateManager(rows, context + int(counts.max()))
    for _ in range(rows):
        manager.allocate([0], manager.max_tokens)
    state = manager.open_state(model.name, model.kv_layers, model.recurrent_layers)
    before = np.tile(np.arange(context), rows)
    state.append(numbers, np.full(rows, context), before, before)
    positions = context + np.concatenate([np.arange(count) for count in counts])
    tokens = torch.zeros(pack_tokens, dtype=torch.int64, device=model.device)
    at = torch.from_numpy(positions).to(model.device)
    index = torch.arange(pack_tokens, device=model.device)
    times_ms = []
    for _ in range(_WARM_UPS + repeats):
        slots = state.append(numbers, counts, positions, positions)
        view = state.view(numbers, counts, positions, slots)
        _wait(model.device)
        started = time.perf_counter()
        model.forward(tokens, at, view, index)
        _wait(model.device)
        times_ms.append((time.perf_counter() - started) * 1000)
        state.rollback(numbers, np.full(rows, context))
    return statistics.median(times_ms[_WARM_UPS:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
