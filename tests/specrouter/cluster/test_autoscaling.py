"""More replicas where objectives are missed, one less where the others are idle, within bounds."""

from hypothesis import given
from hypothesis import strategies as st

from specrouter.cluster.autoscaling import Bounds, Seen, desired_replicas

BOUNDS = Bounds(1, 8)


def wanted(replicas: int, *seen: float, bounds: Bounds = BOUNDS) -> int:
    judged, attained, refused, busy = seen
    found = Seen(int(judged), int(attained), int(refused), busy)
    return desired_replicas(replicas, found, bounds).replicas


def test_what_is_missed_says_how_many_more() -> None:
    assert wanted(4, 100, 96, 0, 0.9) == 4
    assert wanted(4, 100, 90, 0, 0.9) == 5
    assert wanted(4, 100, 60, 0, 0.9) == 7
    assert wanted(2, 100, 0, 0, 0.9) == 4, "at most about twice as many at once"


def test_who_was_refused_was_missed() -> None:
    assert wanted(4, 60, 60, 40, 0.9) == 7


def test_few_requests_say_nothing() -> None:
    assert wanted(4, 19, 0, 0, 0.9) == 4


def test_one_less_where_the_others_are_idle_enough() -> None:
    assert wanted(4, 100, 100, 0, 0.4) == 3, "0.53 afterwards"
    assert wanted(4, 100, 100, 0, 0.5) == 4, "0.67 afterwards"
    assert wanted(4, 0, 0, 0, 0.0) == 3
    assert wanted(1, 0, 0, 0, 0.0) == 1


def test_bounds_hold_and_the_reason_has_the_share() -> None:
    assert wanted(8, 100, 50, 0, 1.0) == 8
    assert wanted(2, 0, 0, 0, 0.0, bounds=Bounds(2, 8)) == 2
    assert "60% of objectives" in desired_replicas(4, Seen(100, 60, 0, 0.9), BOUNDS).reason


@given(
    st.integers(1, 64), st.integers(0, 500), st.floats(0, 1), st.integers(0, 200), st.floats(0, 1)
)
def test_it_does_not_go_to_and_fro(
    replicas: int, judged: int, share: float, refused: int, busy: float
) -> None:
    """With one less, everything attained and the load spread over the others, no more are wanted;
    and no less is attained, no fewer are wanted."""
    attained = int(judged * share)
    seen = Seen(judged, attained, refused, busy)
    found = desired_replicas(replicas, seen, Bounds())
    assert 1 <= found.replicas <= 64
    if found.replicas < replicas:
        spread = busy * replicas / found.replicas
        after = desired_replicas(found.replicas, Seen(judged, judged, 0, spread), Bounds())
        assert after.replicas <= found.replicas
    worse = desired_replicas(replicas, Seen(judged, attained // 2, refused, busy), Bounds())
    assert worse.replicas >= found.replicas
