"""Requests go round the replicas until one can attain their objectives."""

from __future__ import annotations

from dataclasses import replace

from research.policies.autoregressive import Autoregressive
from research.policies.slos_serve import slos_serve
from research.sim.handover import HandOver, after_arrival, hand_over
from specrouter.view import EngineView, RequestView
from tests.specrouter.slo.test_admission import request, view
from tests.specrouter.slo_machines import OPT_7B

POLICY = slos_serve(lambda view: Autoregressive(OPT_7B, idle_ms=100.0), 256)


def attainable(replica: EngineView, asked: RequestView) -> bool:
    admission = POLICY(after_arrival(replica, asked))
    return asked.id in admission.admitted and asked.id not in admission.declined


def asked(number: int) -> RequestView:
    return request(number, left=800, tpot_ms=50.0, ttft_ms=250.0)


IDLE = view([], [])
# It has promised a prompt that takes all of its time until then.
BUSY = view([], [request(90, left=1500, row=0, tpot_ms=50.0, ttft_ms=240.0)])


def test_the_first_that_can_attain_the_objective_takes_the_request() -> None:
    replicas = [BUSY, BUSY, IDLE, IDLE]
    assert hand_over(asked(1), replicas, 0, attainable, 3) == HandOver(2, 2)
    assert hand_over(asked(1), replicas, 2, attainable, 3) == HandOver(2, 0)
    assert hand_over(asked(1), replicas, 3, attainable, 3) == HandOver(3, 0)
    assert hand_over(asked(1), [IDLE, BUSY], 5, attainable, 1) == HandOver(0, 1)


def test_after_so_many_hops_it_is_best_effort_at_the_first_or_declined() -> None:
    replicas = [BUSY, BUSY, IDLE]
    assert hand_over(asked(1), replicas, 0, attainable, 1) == HandOver(0, 2, True)
    assert hand_over(asked(1), replicas, 0, attainable, 1, "decline") == HandOver(None, 2)
    assert hand_over(asked(1), [BUSY], 0, attainable, 9) == HandOver(0, 1, True)


def test_more_replicas_attain_more_of_a_burst() -> None:
    def served(count: int) -> int:
        replicas, taken = [IDLE] * count, 0
        for number in range(12):
            found = hand_over(asked(number), replicas, number, attainable, count - 1)
            if found.replica is not None and not found.is_best_effort:
                taken += 1
                running = [*replicas[found.replica].running, replace(asked(number), row=number)]
                replicas[found.replica] = view([], running)
        return taken

    assert 0 < served(1) < served(2) < served(4)
    assert served(4) == 4 * served(1)
