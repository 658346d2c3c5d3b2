"""Access to an engine's measurements, and the switches that benchmarks need.

Contract: only `run_idle` and `check_integrity` wait for a cycle.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric

from specrouter.cycle import DraftShape
from specrouter.engine.admission_log import AdmissionRecord
from specrouter.engine.cycle_log import CycleTimes
from specrouter.engine.decode_counts import DecodeFigures
from specrouter.engine.engine import Engine
from specrouter.engine.engine_state import EngineState
from specrouter.engine.engine_thread import EngineThread
from specrouter.engine.prefix_record import PrefixRecord
from specrouter.engine.serving import ReplicaFigures
from specrouter.engine.slo_accounts import SloAccounts
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.routing.decision_record import DecisionRecord
from specrouter.view import ChainDecision


class EngineInstruments:
    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    @property
    def engine(self) -> Engine:
        return self._thread.engine

    @property
    def slo_accounts(self) -> SloAccounts:
        """Counts of objectives and of admission; read-only."""
        return self.engine.book.slo_accounts

    def performance(self) -> PerformanceSnapshot:
        """Return the measurements that the scheduler decides by now."""
        return self.engine.profiler.snapshot()

    def statistics(self) -> EngineStatistics:
        """Return totals since the start: cycles, tokens, and times by model and stage."""
        return self.engine.profiler.statistics()

    def decoded(self) -> DecodeFigures:
        """Return totals of decoding since the start: by chain, by draft position, against plans."""
        return self.engine.steps.counts.figures()

    def engine_state(self) -> EngineState:
        """Return the current requests, KV memory and quarantines."""
        return self._thread.state()

    def ended_requests(self) -> Iterator[Metric]:
        """Yield Prometheus metrics of the requests that have ended."""
        return self.engine.book.meter.collect()

    def replicas(self) -> Mapping[str, ReplicaFigures]:
        return {}

    def routings(self) -> Sequence[Mapping[str, Any]]:
        return ()

    def decision(self) -> ChainDecision:
        """Return the decision in use for requests that override nothing, or what one would get."""
        return self.engine.decision

    def cycles(self) -> Sequence[CycleTimes]:
        """Return the times of the last cycles, oldest first."""
        return self.engine.steps.cycles.last()

    def decisions(self) -> list[DecisionRecord]:
        """Return the last switches of chain or trees, each with its alternatives, oldest first."""
        return list(self.engine.policies.current.records)

    def admissions(self) -> list[AdmissionRecord]:
        """Return admission's last decisions about objectives, with reasons, oldest first."""
        return self.engine.book.admissions.records

    def prefixes(self) -> list[PrefixRecord]:
        """Return the last ended requests' cached prompt tokens, oldest first."""
        return list(self.engine.book.prefixes)

    def predict(
        self,
        chain: Sequence[str],
        depth: int,
        width: int = 1,
        nodes: int | None = None,
        requests: int = 1,
    ) -> float:
        """Return the predicted milliseconds per token of a request, for a chain and tree shape.

        Args:
            chain: names of its models, the target last.
            depth: levels of each tree.
            width: nodes in a level.
            nodes: nodes of each tree that the target verifies; None: all.
            requests: number of sampled requests that decode together.
        """
        return self.engine.predict(tuple(chain), DraftShape(depth, width, nodes or 0), requests)

    def predicted_tpot_ms(self, requests: int) -> float:
        """Return the predicted TPOT of each of `requests` requests that decode together."""
        return self.engine.predicted_tpot_ms(requests)

    def predicted_prefill_ms(self) -> float:
        """Return the target's time per prompt token, in chunks of `engine.prefill_chunk`."""
        return self.engine.predicted_prefill_ms()

    def baseline_tpot_ms(self) -> float:
        """Return the time per token of one request alone on the target."""
        return self.engine.baseline_tpot_ms()

    def seconds_until_admitted(self) -> float:
        """Return the expected wait for a row of a request that comes now, from recent ends."""
        return self._thread.seconds_until_admitted()

    def set_learning(self, is_learning: bool) -> None:
        """Set whether the scheduler learns from cycles; benchmarks turn it off for other runs."""
        self.engine.profiler.is_learning = is_learning

    def run_idle(self, function: Callable[[], Any]) -> Any:
        """Run a function in the engine's thread, between cycles, with that thread's OpenMP workers.

        For measurements while no request runs; running requests wait for it. Raises what `function`
        raises, or `UnavailableError` if the router is closed before its turn.
        """
        return self._thread.run_idle(function)

    def check_integrity(self) -> None:
        """Assert the invariants of all state, while no request runs."""
        self.run_idle(self.engine.check_integrity)
