"""FlowGuard: StreamServe's score of a worker, and its bound of overload.

Pure. Source: StreamServe (arXiv 2604.09562), Equations 1 to 4 and Algorithm 2. The paper prints
M/100 in Equation 3 where M is a share everywhere else, so that memory would play no part; here it
is a share there, too (docs/architecture.md). How it norms queue and load is not published.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specrouter.cluster.state import ReplicaState

# As published: of cache hits, free memory, an empty queue and idle rows.
WEIGHTS = (0.4, 0.1, 0.3, 0.2)
OVERLOAD = 0.85  # from which a worker is left out, as published


@dataclass(frozen=True)
class WorkerMetrics:
    """All from 0 to 1: cache hits of this request, held memory, the queue out of the longest
    one, and running requests out of rows."""

    cache: float
    memory: float
    queue: float
    load: float


def metrics_of(
    state: ReplicaState, waiting: int, running: int, hit_rate: float, longest_queue: int
) -> WorkerMetrics:
    """`waiting`, `running`: to the router's knowledge. `hit_rate`: of the prompt's tokens."""
    return WorkerMetrics(
        hit_rate,
        state.kv_share,
        min(1.0, waiting / longest_queue),
        min(1.0, running / max(1, state.rows)),
    )


def score(worker: WorkerMetrics) -> float:
    """Equation 1."""
    cache, memory, queue, load = WEIGHTS
    return (
        cache * worker.cache
        + memory * (1.0 - worker.memory)
        + queue * (1.0 - worker.queue)
        + load * (1.0 - worker.load)
    )


def overload(worker: WorkerMetrics) -> float:
    """Equation 3."""
    return worker.memory + 2.0 * worker.queue


def ranked(workers: Sequence[WorkerMetrics]) -> list[int]:
    """Algorithm 2: places of the workers, best first, without those that are overloaded; where all
    are, all of them, the shortest queue first. Ties: the lowest place."""
    sound = [place for place, worker in enumerate(workers) if overload(worker) <= OVERLOAD]
    if sound:
        return sorted(sound, key=lambda place: -score(workers[place]))
    return sorted(range(len(workers)), key=lambda place: workers[place].queue)
