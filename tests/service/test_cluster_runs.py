"""What a run of requests is, and when a refused caller was told the truth."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.service.cluster_load import Site
from tests.service.cluster_runs import Asked, Run, Served, requests_of, retries
from tests.specrouter.cluster.states import state

OUTPUT: Any = None  # of no account here


def served(sent_s: float, prompt: int, told_s: float | None = None) -> Served:
    return Served(Asked(sent_s, (300,) * prompt, 8, 0), sent_s, OUTPUT, told_s)


def test_the_true_wait_ends_when_a_prompt_no_shorter_is_taken() -> None:
    found = retries(
        [served(1.0, 50, told_s=2.0), served(2.0, 10), served(4.5, 60), served(5.0, 50)]
    )
    assert (found.told_s, found.true_s) == ([2.0], [3.5])
    assert found.within_2 == 1.0


def test_a_refusal_after_which_none_was_taken_is_not_judged() -> None:
    found = retries([served(1.0, 50, told_s=2.0), served(0.5, 60), served(4.5, 10)])
    assert found.told_s == []


def test_a_wait_below_a_second_cannot_be_told() -> None:
    found = retries([served(1.0, 50, told_s=1.0), served(1.1, 50), served(1.2, 50, told_s=3.0)])
    assert found.true_s == [1.0]


def test_lengths_are_cut_and_a_seed_gives_one_list() -> None:
    run = Run("slo", 1.0, 50, 3)
    asked = requests_of(None, run)
    assert asked == requests_of(None, run)
    assert max(len(one.prompt) for one in asked) == 700
    assert max(one.tokens for one in asked) == 256
    assert asked[-1].at_s == pytest.approx(49.0)


def test_load_is_a_share_of_what_the_replicas_could_serve() -> None:
    """Twice the time for everything, half the rate; and a second replica as fast doubles it."""
    one = state(prefill_ms=0.1, tpot_ms=((1, 10.0), (4, 16.0)))
    slow = state(prefill_ms=0.2, tpot_ms=((1, 20.0), (4, 32.0)))
    arguments, router = SimpleNamespace(traces=None), OUTPUT
    run = Run("slo", 0.5, 20, 0)

    def rate(*states: Any) -> float:
        return Site(router, arguments, states).rate(run)  # type: ignore[arg-type]

    assert rate(slow) == pytest.approx(rate(one) / 2)
    assert rate(one, one) == pytest.approx(2 * rate(one))
    assert rate(one, slow) == pytest.approx(1.5 * rate(one))
