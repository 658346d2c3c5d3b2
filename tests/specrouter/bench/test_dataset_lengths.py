"""Poisson arrivals with the lengths of SpecRouter's four datasets."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest

from specrouter.bench.dataset_lengths import DATASETS, poisson_of_datasets
from specrouter.bench.traces import rate_per_s


def test_arrivals_are_poisson_at_the_rate() -> None:
    arrivals = poisson_of_datasets(4.0, 4000, seed=1)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(arrivals)]
    assert arrivals[0].at_s == 0.0
    assert rate_per_s(arrivals) == pytest.approx(4.0, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.05)


def test_each_dataset_has_its_share_and_its_lengths() -> None:
    arrivals = poisson_of_datasets(1.0, 8000, seed=2)
    shares = Counter(arrival.category for arrival in arrivals)
    assert set(shares) == set(DATASETS)
    for name, lengths in DATASETS.items():
        assert shares[name] / len(arrivals) == pytest.approx(0.25, abs=0.02)
        own = [arrival for arrival in arrivals if arrival.category == name]
        for drawn, deciles in (
            ([arrival.input_tokens for arrival in own], lengths.input_tokens),
            ([arrival.output_tokens for arrival in own], lengths.output_tokens),
        ):
            assert deciles[0] <= min(drawn) <= max(drawn) <= deciles[-1]
            assert statistics.median(drawn) == pytest.approx(deciles[5], rel=0.05)


def test_lengths_rise_from_the_least_to_the_greatest() -> None:
    for lengths in DATASETS.values():
        for deciles in (lengths.input_tokens, lengths.output_tokens):
            assert len(deciles) == 11
            assert list(deciles) == sorted(deciles)


def test_a_seed_gives_one_list_and_no_objectives() -> None:
    arrivals = poisson_of_datasets(2.0, 50, seed=3)
    assert arrivals == poisson_of_datasets(2.0, 50, seed=3) != poisson_of_datasets(2.0, 50, seed=4)
    assert {arrival.slo_ratio for arrival in arrivals} == {None}
