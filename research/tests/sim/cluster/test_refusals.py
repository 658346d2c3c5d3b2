"""What callers are told of a refusal, beside what would have been."""

from research.sim.cluster.refusals import Refusal, Service, header_s, told_and_true, true_wait_s

SERVICE = Service({"a": [1.0, 2.0, 4.0, 8.0]}, [(1.0, 10), (2.0, 500), (3.0, 50)])


def full(ahead: int, retry_after_s: float = 3.0) -> Refusal:
    """Of a queue in which so many stood."""
    return Refusal(
        at_s=1.5, because="room", retry_after_s=retry_after_s,
        prompt_tokens=10, replica="a", ahead=ahead,
    )  # fmt: skip


def late(at_s: float, prompt: int, retry_after_s: float = 1.0) -> Refusal:
    return Refusal(
        at_s=at_s, because="objective", retry_after_s=retry_after_s, prompt_tokens=prompt
    )


def test_a_full_queue_is_empty_when_so_many_have_rows() -> None:
    assert true_wait_s(full(2), SERVICE) == 2.5
    assert true_wait_s(full(9), SERVICE) is None


def test_an_objective_is_attainable_when_one_no_easier_is_promised() -> None:
    assert true_wait_s(late(1.5, 100), SERVICE) == 0.5
    assert true_wait_s(late(2.5, 40), SERVICE) == 0.5
    assert true_wait_s(late(2.5, 400), SERVICE) is None


def test_headers_have_whole_seconds_and_at_least_one() -> None:
    assert [header_s(each) for each in (0.0, 0.2, 1.0, 1.2, 59.5)] == [1, 1, 1, 2, 60]
    refusals = [full(2, 3.2), late(1.5, 100, 0.1)]
    assert told_and_true(refusals, SERVICE) == [(4.0, 2.5), (1.0, 1.0)]
