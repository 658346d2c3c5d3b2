"""What callers are told of a refusal, beside what would have been."""

from research.sim.cluster.refusals import Refusal, Service, header_s, told_and_true, true_wait_s

SERVICE = Service({"a": [1.0, 2.0, 4.0, 8.0]}, [(1.0, 10), (2.0, 500), (3.0, 50)])


def test_a_full_queue_is_empty_when_so_many_have_rows() -> None:
    full = Refusal(
        at_s=1.5, because="room", retry_after_s=3.0, prompt_tokens=10, replica="a", ahead=2
    )
    assert true_wait_s(full, SERVICE) == 2.5
    assert (
        true_wait_s(
            Refusal(
                at_s=1.5, because="room", retry_after_s=3.0, prompt_tokens=10, replica="a", ahead=9
            ),
            SERVICE,
        )
        is None
    )


def test_an_objective_is_attainable_when_one_no_easier_is_promised() -> None:
    assert (
        true_wait_s(
            Refusal(at_s=1.5, because="objective", retry_after_s=1.0, prompt_tokens=100), SERVICE
        )
        == 0.5
    )
    assert (
        true_wait_s(
            Refusal(at_s=2.5, because="objective", retry_after_s=1.0, prompt_tokens=40), SERVICE
        )
        == 0.5
    )
    assert (
        true_wait_s(
            Refusal(at_s=2.5, because="objective", retry_after_s=1.0, prompt_tokens=400), SERVICE
        )
        is None
    )


def test_headers_have_whole_seconds_and_at_least_one() -> None:
    assert [header_s(each) for each in (0.0, 0.2, 1.0, 1.2, 59.5)] == [1, 1, 1, 2, 60]
    refusals = [
        Refusal(
            at_s=1.5, because="room", retry_after_s=3.2, prompt_tokens=10, replica="a", ahead=2
        ),
        Refusal(at_s=1.5, because="objective", retry_after_s=0.1, prompt_tokens=100),
    ]
    assert told_and_true(refusals, SERVICE) == [(4.0, 2.5), (1.0, 1.0)]
