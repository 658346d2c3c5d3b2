"""Hostile requests are the same for the same seed, and as many as were asked for."""

from checks.service.hostile import requests


def test_requests_depend_on_the_seed_alone() -> None:
    first, again, other = requests(300, 60, 1), requests(300, 60, 1), requests(300, 60, 2)
    assert first == again != other
    assert len(first) == 300
    assert sum(b"structured_outputs" in one.content for one in first) >= 60
    assert len({one.content for one in first}) > 200
