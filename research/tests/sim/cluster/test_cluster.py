"""A simulated cluster: one replica is the plain simulation, failures lose nothing, seeds repeat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.sim.cluster.cluster import ClusterSettings, SimulatedCluster
from research.sim.cluster.failures import NO_DELAYS, Failure, drawn_failures
from research.sim.cluster.pair import SimulatedPair
from research.sim.cluster.replica import Replica, SimulatedReplica
from research.sim.machine import MACHINES, load_machine
from research.sim.scenarios import SCENARIOS, scenario_requests
from research.sim.service import SimulatedService
from specrouter.bench.replay import LoadRequest, ReplayOutcome, replay
from specrouter.cluster.state import ReplicaState
from specrouter.config import ResumeConfig, RoutingConfig, TreesConfig
from specrouter.config.policies import REPLICA_POLICIES
from tests.load_requests import load_request
from tests.specrouter.slo_machines import OPT_7B

pytestmark = pytest.mark.slow
MACHINE = load_machine(MACHINES / "slos-serve-opt-6.7b.yaml")


def service(policy: str = "vllm", slow: float = 1.0) -> SimulatedService:
    made = SimulatedService(machine=MACHINE.slowed(slow), acceptance=0.7, trees=TreesConfig())
    made.use(policy)
    return made


def replica(policy: str = "vllm", slow: float = 1.0) -> Replica:
    return SimulatedReplica(service(policy, slow))


def pair(kv_ms: float = 1.0) -> SimulatedPair:
    prefill, decode = (SimulatedReplica(service()) for _ in range(2))
    return SimulatedPair(prefill=prefill, decode=decode, kv_ms_per_token=kv_ms)


def cluster(
    count: int, routing: str = "round-robin", make: Any = replica, **given: Any
) -> SimulatedCluster:
    given.setdefault("routing", RoutingConfig(policy=routing))
    return SimulatedCluster({f"r{at}": make for at in range(count)}, ClusterSettings(**given))


def served(one: SimulatedCluster, requests: list[LoadRequest]) -> list[ReplayOutcome]:
    return replay(requests, one, one)


def plain(prompt: int, tokens: int, seed: int, **given: Any) -> LoadRequest:
    """Greedy, without an objective unless one is given."""
    usual = {"category": "any", "temperature": 0.0, "token_ids": (0,) * prompt}
    return load_request(new_tokens=tokens, seed=seed, **{**usual, **given})


def chat(rate: float, count: int, seed: int = 5) -> list[LoadRequest]:
    return scenario_requests(SCENARIOS["ChatBot"], OPT_7B, rate, count, seed)


@pytest.mark.parametrize("policy", ["vllm", "slo", "spec-4"])
def test_one_replica_without_delays_is_the_service_itself(policy: str) -> None:
    alone = service(policy)
    found = served(cluster(1, make=partial(replica, policy), delays=NO_DELAYS), chat(4.0, 24))
    assert found == replay(chat(4.0, 24), alone, alone)


@pytest.mark.parametrize("routing", REPLICA_POLICIES.names)
def test_the_same_seeds_give_the_same(routing: str) -> None:
    failures = drawn_failures(3, 10.0, 4.0, 1.0, seed=2)
    found = [served(cluster(3, routing, failures=failures), chat(8.0, 12)) for _ in range(2)]
    assert found[0] == found[1]


FAILURES = st.lists(
    st.builds(
        lambda replica, at_s, down_s, kind: Failure(replica, at_s, at_s + down_s, kind),
        st.integers(0, 2),
        st.floats(0.0, 6.0),
        st.floats(0.05, 4.0),
        st.sampled_from(["killed", "hangs", "restarted"]),
    ),
    max_size=5,
)


@given(FAILURES, st.sampled_from(["slo", "flowguard", "round-robin"]), st.booleans())
@settings(max_examples=6, deadline=None)
def test_no_request_is_lost_whatever_fails(
    failures: list[Failure], routing: str, is_paired: bool
) -> None:
    """As long as its replicas' failures are within `resume.limit`; who comes while none is ready is
    told so."""
    one = cluster(
        3,
        routing,
        make=pair if is_paired else replica,
        failures=tuple(failures),
        resume=ResumeConfig(limit=len(failures)),
    )
    requests = [
        plain(200, 30, seed=at, at_s=0.2 * at, objective_ms=100.0, ttft_ms=2000.0)
        for at in range(24)
    ]
    for outcome, job in zip(served(one, requests), one.jobs, strict=True):
        if outcome.answer.error == "no replica is ready":
            continue
        assert outcome.answer.error is None, job
        assert outcome.answer.tokens == 30
        came_s = [at_s for at_s, _ in job.served.sent.commits] if job.served else []
        assert came_s == sorted(came_s), "one clock over all attempts"


def test_a_request_goes_on_with_what_was_received() -> None:
    failure = Failure(0, 1.0, 60.0)
    one = cluster(2, failures=(failure,))
    requests = [plain(100, 100, seed=at) for at in range(2)]
    found = served(one, requests)
    moved, stayed = one.jobs
    assert (moved.moves, stayed.moves) == (1, 0)
    before = sum(count for at_s, count in moved.commits if at_s <= failure.at_s)
    assert moved.tokens == before > 10, "what came before it is not made again"
    commits = moved.served.sent.commits if moved.served else []
    gap_s = next(at_s for at_s, _ in commits if at_s > failure.at_s) - failure.at_s
    assert 0.07 < gap_s < 0.3, "the loss is known after 70 ms, then it is read and goes on"
    assert [one.answer.tokens for one in found] == [100, 100]


def test_who_hangs_is_left_after_the_silence_and_comes_back() -> None:
    failure = Failure(0, 1.0, 5.0, "hangs")
    one = cluster(2, failures=(failure,))
    requests = [plain(100, 300, seed=at) for at in range(2)]
    requests += [plain(100, 5, seed=at, at_s=8.0) for at in range(2, 6)]
    served(one, requests)
    moved = one.jobs[0]
    assert moved.moves == 1
    commits = moved.served.sent.commits if moved.served else []
    later_s = next(at_s for at_s, _ in commits if at_s > 1.1)
    assert 2.0 < later_s < 2.8, "silence of 1.5 s, since it spoke last"
    assert {job.first_place for job in one.jobs[2:]} == {"r0", "r1"}


def test_a_restart_moves_at_once_and_is_no_failure() -> None:
    one = cluster(2, failures=(Failure(0, 1.0, 3.0, "restarted"),), resume=ResumeConfig(limit=0))
    requests = [plain(100, 100, seed=at) for at in range(2)]
    assert [each.answer.error for each in served(one, requests)] == [None, None]
    assert one.jobs[0].moves == 1


def test_more_failures_than_the_limit_end_a_request() -> None:
    failures = tuple(Failure(at, 1.0, 60.0) for at in range(2))
    one = cluster(3, failures=failures, resume=ResumeConfig(limit=0))
    requests = [plain(100, 100, seed=at) for at in range(3)]
    errors = [each.answer.error for each in served(one, requests)]
    assert errors == ["its replicas have failed"] * 2 + [None]


def test_states_that_are_old_make_a_herd_and_own_counts_do_not() -> None:
    requests = [plain(400, 40, seed=at, at_s=1.1) for at in range(12)]
    first = [plain(400, 10, seed=99)]
    places = {}
    for routing in ("flowguard-printed", "flowguard", "round-robin", "slo"):
        one = cluster(4, routing)
        served(one, first + requests)
        named = [job.first_place for job in one.jobs[1:]]
        places[routing] = max(map(named.count, named))
    assert places == {"flowguard-printed": 12, "flowguard": 3, "round-robin": 3, "slo": 3}


def test_states_are_at_most_as_old_as_they_are_told() -> None:
    one = cluster(4)
    served(one, chat(8.0, 40))
    assert max(one.fleet.ages_s) <= 0.51


def test_a_slower_replica_attains_less_and_is_sent_less() -> None:
    makes = {"r0": partial(replica, "vllm", 1.0), "r1": partial(replica, "vllm", 2.5)}
    one = SimulatedCluster(makes, ClusterSettings(routing=RoutingConfig(policy="slo")))
    served(one, chat(2.0, 40))
    named = [job.first_place for job in one.jobs]
    assert named.count("r0") > named.count("r1")


@dataclass(eq=False)
class TellingReplica(SimulatedReplica):
    """`told`: its times as it tells them, over what is true."""

    told: float = 1.0

    def state(self) -> ReplicaState:
        own = super().state()
        tpot_ms = tuple((rows, ms * self.told) for rows, ms in own.tpot_ms)
        return replace(own, tpot_ms=tpot_ms, prefill_ms=own.prefill_ms * self.told)


def test_one_that_tells_a_third_of_its_times_is_found_out_and_sent_less() -> None:
    def made(told: float) -> Replica:
        return TellingReplica(service(), told=told)

    def there(tells: float) -> tuple[int, float]:
        """Of the last 30 requests those at the second of two equal ones; its correction."""
        makes = {"r0": partial(made, 1.0), "r1": partial(made, tells)}
        one = SimulatedCluster(makes, ClusterSettings(routing=RoutingConfig(policy="slo")))
        served(one, chat(6.0, 60))
        [_, second] = one.fleet.ready(one.now_s())
        return [job.first_place for job in one.jobs[30:]].count("r1"), second.correction.tpot

    requests, factor = there(1 / 3)
    assert factor == pytest.approx(3.0, rel=0.4)
    assert there(1.0)[1] == pytest.approx(1.0, abs=0.4)
    assert requests < 22, "what it tells alone would bring it nearly all"


def test_full_queues_refuse_and_say_when() -> None:
    def made() -> Replica:
        small = SimulatedService(
            machine=replace(MACHINE, max_requests=2), acceptance=0.7, trees=TreesConfig()
        )
        small.use("vllm")
        return SimulatedReplica(small)

    small = cluster(1, make=made, max_waiting=2, delays=NO_DELAYS)
    requests = [plain(50, 40, seed=at, at_s=0.1 * at) for at in range(12)]
    found = served(small, requests)
    refused = [one for one in found if one.answer.error == "refused"]
    assert len(refused) == len(small.refusals) > 0
    assert {one.because for one in small.refusals} == {"room"}
    assert all(one.answer.tokens == 40 for one in found if one.answer.error is None)
