"""AdaServe's workload, drawn or from its traces."""

from collections import Counter
from pathlib import Path

import pytest

from modelpool.errors import ConfigError
from research.sim.adaserve_load import AdaserveLoad


def test_drawn_requests_have_the_published_mix_and_objectives() -> None:
    found = AdaserveLoad(rate_per_s=4.0, requests=2000, seed=1).requests_for(30.0)
    objectives = {one.category: one.objective_ms for one in found}
    assert objectives == {"coding": 36.0, "chat": 50.0, "summarization": 150.0}
    shares = Counter(one.category for one in found)
    assert shares["coding"] / 2000 == pytest.approx(0.6, abs=0.03)
    assert found[-1].at_s == pytest.approx(500.0, rel=0.1)
    assert {one.new_tokens for one in found} == {256}
    assert all(one.ttft_ms is None for one in found), "TTFT is no part of the metric"


def test_share_and_objective_of_urgent_ones_are_as_asked() -> None:
    found = AdaserveLoad(
        rate_per_s=4.0, requests=200, seed=1, urgent_share=0.3, urgent_ratio=0.6
    ).requests_for(28.0)
    assert sum(one.category == "coding" for one in found) == 60
    urgent = [one.objective_ms for one in found if one.category == "coding"]
    assert urgent == pytest.approx([0.6 * 28.0] * 60)
    assert {one.objective_ms for one in found if one.category == "chat"} == {50.0}


def test_categories_peak_one_after_the_other() -> None:
    found = AdaserveLoad(rate_per_s=4.0, requests=1500, seed=1, is_fluctuating=True).requests_for(
        30.0
    )
    times = [one.at_s for one in found]
    assert times == sorted(times)
    thirds = [Counter[str](), Counter[str](), Counter[str]()]
    for one in found:
        thirds[min(2, int(3 * one.at_s / times[-1]))][one.category] += 1
    assert thirds[0]["coding"] == max(each["coding"] for each in thirds)
    assert thirds[1]["chat"] == max(each["chat"] for each in thirds)
    assert thirds[2]["summarization"] == max(each["summarization"] for each in thirds)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    header = "emission_time_ms,category,input_tokens,output_tokens,slo_ratio\n"
    for rate in ("2.8", "3.6", "4.4"):
        lines = [f"{250 * at},coding,{100 + at},256,1.2\n" for at in range(40)]
        file = tmp_path / f"adaserve_fig8_9_rps{rate}_ol256.csv"
        file.write_text(header + "".join(lines))
    return tmp_path


def test_traces_are_stretched_to_the_rate_and_seeds_take_other_parts(folder: Path) -> None:
    one, other = (
        AdaserveLoad(rate_per_s=2.0, requests=15, seed=seed, traces=folder).requests_for(30.0)
        for seed in (0, 1)
    )
    assert one[-1].at_s == pytest.approx(14 / 2.0)
    assert len(one[0].token_ids) == 100
    assert len(other[0].token_ids) == 115


def test_a_trace_that_is_too_short_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="40 requests"):
        AdaserveLoad(rate_per_s=2.0, requests=50, seed=0, traces=folder).requests_for(30.0)
