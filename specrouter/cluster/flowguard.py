"""FlowGuard: StreamServe's score of a worker, and its bound of overload.

Pure. Source: StreamServe (arXiv 2604.09562), Equations 1 to 4 and Algorithm 2. Equation 3 prints
M/100 where M is a share everywhere else, so that memory would have almost no weight; here it is a
share there, too (research/FIGURES.md). How the paper normalises queue and load is not published.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specrouter.cluster.state import ReplicaState

# Published weights of cache hits, free memory, an empty queue and idle rows.
WEIGHTS = (0.4, 0.1, 0.3, 0.2)
OVERLOAD = 0.85  # published bound, above which a worker is left out


@dataclass(frozen=True)
class WorkerMetrics:
    """Metrics of a worker, all from 0 to 1.

    Attributes:
        cache: share of this request's tokens in the prefix cache.
        memory: share of memory that is held.
        queue: waiting requests over the longest queue.
        load: running requests over rows.
    """

    cache: float
    memory: float
    queue: float
    load: float


def metrics_of(
    state: ReplicaState, waiting: int, running: int, hit_rate: float, longest_queue: int
) -> WorkerMetrics:
    """Return a worker's metrics.

    `waiting` and `running` are as the router knows them, `hit_rate` is of the prompt's tokens.
    """
    return WorkerMetrics(
        hit_rate,
        state.kv_share,
        min(1.0, waiting / longest_queue),
        min(1.0, running / max(1, state.rows)),
    )


def score(worker: WorkerMetrics) -> float:
    """Return the score (Equation 1)."""
    cache, memory, queue, load = WEIGHTS
    return (
        cache * worker.cache
        + memory * (1.0 - worker.memory)
        + queue * (1.0 - worker.queue)
        + load * (1.0 - worker.load)
    )


def overload(worker: WorkerMetrics) -> float:
    """Return the overload (Equation 3)."""
    return worker.memory + 2.0 * worker.queue


def ranked(workers: Sequence[WorkerMetrics]) -> list[int]:
    """Return the indices of the workers, best first, without overloaded ones (Algorithm 2).

    If all are overloaded, return all of them, the shortest queue first. Ties: the lowest index.
    """
    sound = [place for place, worker in enumerate(workers) if overload(worker) <= OVERLOAD]
    if sound:
        return sorted(sound, key=lambda place: -score(workers[place]))
    return sorted(range(len(workers)), key=lambda place: workers[place].queue)
