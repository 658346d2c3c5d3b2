"""Sums over replicas are field by field."""

from types import SimpleNamespace
from typing import Any, cast

from specrouter.cluster.fleet import Fleet
from specrouter.cluster.instruments import ClusterInstruments
from specrouter.cluster.link import Feed
from specrouter.cluster.reports import ReplicaReport, total, total_state
from specrouter.engine.decode_counts import DecodeCounts
from specrouter.engine.engine_state import EngineState
from specrouter.engine.slo_accounts import AdmissionCounts
from specrouter.profile.profiler import EngineStatistics
from specrouter.profile.snapshot import PerformanceSnapshot
from tests.specrouter.cluster import states
from tests.specrouter.cluster.test_fleet import CONFIG


def state(running: int, models: dict[str, int], tightest: float | None) -> EngineState:
    return EngineState(
        running=running,
        waiting=1,
        rows=4,
        kv_reserved_tokens=10,
        kv_capacity_tokens=100,
        kv_bytes=models,
        quarantines=models,
        quarantined=frozenset(models),
        tightest_tpot_ms=tightest,
    )


def test_states_add_up_and_the_tightest_objective_is_the_least() -> None:
    found = total_state([state(1, {"a": 1}, 50.0), state(2, {"a": 2, "b": 3}, 20.0)])
    assert (found.running, found.waiting, found.rows) == (3, 2, 8)
    assert found.kv_bytes == {"a": 3, "b": 3}
    assert found.quarantined == {"a", "b"}
    assert found.tightest_tpot_ms == 20.0
    assert total_state([state(1, {}, None)]).tightest_tpot_ms is None


def test_mappings_tuples_and_figures_in_them_add_up() -> None:
    one = {"x": AdmissionCounts(1, 2, 3, 4, 5)}
    assert total([one, one, {"y": AdmissionCounts(1)}]) == {
        "x": AdmissionCounts(2, 4, 6, 8, 10),
        "y": AdmissionCounts(1),
    }
    assert total([((1, 2), 0.5), ((1, 3), 1.0)]) == ((2, 5), 1.5)
    cycles = total([EngineStatistics(cycles=2), EngineStatistics(cycles=3, model_ms={"a": 1.0})])
    assert (cycles.cycles, cycles.model_ms) == (5, {"a": 1.0})


def report(cycles: int) -> ReplicaReport:
    """Everything is counted as often as there were cycles."""
    counts = DecodeCounts()
    counts.record_prompt(cycles)
    return ReplicaReport(
        engine=state(1, {"a": cycles}, 5.0),
        statistics=EngineStatistics(cycles=cycles),
        decoded=counts.figures(),
        performance=PerformanceSnapshot(times={}, parameters={}),
        decisions=(),
        admissions=(),
        prefixes=(),
        admission_counts={"fast": AdmissionCounts(cycles)},
    )


def test_sums_do_not_fall_where_a_replica_begins_anew() -> None:
    """Its process is replaced twice."""
    links: list[Any] = [SimpleNamespace(name=name) for name in ("a", "b")]
    fleet = Fleet(links, CONFIG)
    told = ClusterInstruments(fleet, cast(Any, None), cast(Any, None))
    a, b = fleet.members.values()
    fleet._hear(b, Feed(states.state(), report(100)))
    expected = {9: 109, 2: 111, 3: 112, 1: 113}
    for cycles, sums in expected.items():
        fleet._hear(a, Feed(states.state(), report(cycles)))
        counted = told.statistics().cycles, told.decoded().prompt_tokens
        admitted = told.slo_accounts.admissions()["fast"].admitted
        assert (*counted, admitted, told.engine_state().quarantines["a"]) == (sums,) * 4
    a.standing = "lost"
    assert told.engine_state().running == 1, "of those that serve"
    assert told.engine_state().quarantines["a"] == 113
