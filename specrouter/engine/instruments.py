"""EngineInstruments: what is measured of the engine, and what measurements set.

Contract: nothing waits for a cycle but `run_idle` and `check_integrity`.
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
        """What is counted of objectives and of admission, to be read."""
        return self.engine.book.slo_accounts

    def performance(self) -> PerformanceSnapshot:
        """What the scheduler knows now."""
        return self.engine.profiler.snapshot()

    def statistics(self) -> EngineStatistics:
        """Totals since the start: cycles, tokens, and where the time went."""
        return self.engine.profiler.statistics()

    def decoded(self) -> DecodeFigures:
        """Totals of the engine since it began: by chain, by position, against what was planned."""
        return self.engine.steps.counts.figures()

    def engine_state(self) -> EngineState:
        """Requests, KV memory and quarantines now."""
        return self._thread.state()

    def ended_requests(self) -> Iterator[Metric]:
        """Of the requests that have ended, in Prometheus' form."""
        return self.engine.book.meter.collect()

    def replicas(self) -> Mapping[str, ReplicaFigures]:
        return {}

    def routings(self) -> Sequence[Mapping[str, Any]]:
        return ()

    def decision(self) -> ChainDecision:
        """In use for requests that leave all open; before there was one, what one would get."""
        return self.engine.decision

    def cycles(self) -> Sequence[CycleTimes]:
        """Where the time of the last ones went, oldest first."""
        return self.engine.steps.cycles.last()

    def decisions(self) -> list[DecisionRecord]:
        """The last switches of chain or trees, each with its alternatives, oldest first."""
        return list(self.engine.policies.current.records)

    def admissions(self) -> list[AdmissionRecord]:
        """The last decisions of admission about objectives, each with its reason, oldest first."""
        return self.engine.book.admissions.records

    def prefixes(self) -> list[PrefixRecord]:
        """How much of their prompts the last requests found in the prefix cache, oldest first."""
        return list(self.engine.book.prefixes)

    def predict(
        self,
        chain: Sequence[str],
        depth: int,
        width: int = 1,
        nodes: int | None = None,
        requests: int = 1,
    ) -> float:
        """Milliseconds per token of a request that are predicted now for a way to decode.

        Args:
            nodes: of each tree that the target verifies; None: all.
            requests: that decode together, sampled.
        """
        return self.engine.predict(tuple(chain), DraftShape(depth, width, nodes or 0), requests)

    def predicted_tpot_ms(self, requests: int) -> float:
        """Of each of so many requests that decode together, as the scheduler would serve them."""
        return self.engine.predicted_tpot_ms(requests)

    def predicted_prefill_ms(self) -> float:
        """Of a prompt token on the target, in chunks of `engine.prefill_chunk`."""
        return self.engine.predicted_prefill_ms()

    def baseline_tpot_ms(self) -> float:
        """Of one request alone on the target."""
        return self.engine.baseline_tpot_ms()

    def seconds_until_admitted(self) -> float:
        """Of a request that comes now, as the last ones were given rows."""
        return self._thread.seconds_until_admitted()

    def set_learning(self, is_learning: bool) -> None:
        """Whether cycles teach the scheduler. Off, a benchmark's other runs teach it nothing."""
        self.engine.profiler.is_learning = is_learning

    def run_idle(self, function: Callable[[], Any]) -> Any:
        """Runs something in the engine's thread, whose OpenMP workers it shares, between cycles.

        For measurements, when no request runs: those that do wait for it. Raises what `function`
        raises; `UnavailableError` where the router is closed before its turn.
        """
        return self._thread.run_idle(function)

    def check_integrity(self) -> None:
        """Asserts the invariants of all state. For when no request runs."""
        self.run_idle(self.engine.check_integrity)
