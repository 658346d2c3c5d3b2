"""DistServe in closed form, against the equations of Appendix A."""

import pytest

from research.sim.disaggregation import disaggregated, ideal
from specrouter.profile.batch_time import RooflineTime

TIMES = RooflineTime(((0.1, 0.0, 20.0),))  # ten tokens a millisecond, 20 ms beside them


def test_the_best_split_follows_the_workload() -> None:
    """Prompts bind in long ones, decoding in long outputs."""
    long_prompts = disaggregated(TIMES, 50.0, 1000.0, 10.0)
    long_outputs = disaggregated(TIMES, 50.0, 100.0, 1000.0)
    assert (long_prompts.prefill_devices, long_prompts.decode_devices) == (2, 1)
    assert (long_outputs.prefill_devices, long_outputs.decode_devices) == (1, 2)
    # 10,000 tokens/s: 20 prompts of two devices, over three; 60% of 10,000 tokens, twice, over 3.
    assert long_prompts.requests_per_s == pytest.approx(10_000 * 2 / 1000 / 3)
    assert long_outputs.requests_per_s == pytest.approx(0.6 * 10_000 * 2 / 1000 / 3)


@pytest.mark.parametrize(("tpot_ms", "read", "made"), [(50.0, 800, 250), (100.0, 1300, 30)])
def test_no_split_beats_the_balanced_one(tpot_ms: float, read: float, made: float) -> None:
    best = ideal(TIMES, tpot_ms, read, made).requests_per_s
    assert best == pytest.approx(10_000 / (made * tpot_ms / (tpot_ms - 20.0) + read))
    splits = [(a, b) for a in range(1, 30) for b in range(1, 30)]
    found = disaggregated(TIMES, tpot_ms, read, made, splits).requests_per_s
    assert found == pytest.approx(best, rel=0.05)
    assert found <= best * (1.0 + 1e-9)


def test_a_tpot_below_the_overhead_serves_nobody() -> None:
    assert disaggregated(TIMES, 15.0, 100.0, 100.0).requests_per_s == 0.0
    assert ideal(TIMES, 15.0, 100.0, 100.0).requests_per_s == 0.0
