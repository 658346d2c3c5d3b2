"""What slows all models alike moves no curve, and what stays with one model or size moves that."""

import math
from collections.abc import Callable, Iterator

import pytest

from specrouter.profile.perf_model import PerfModel
from tests.specrouter.forward_times import DRAFTER, SIZES, TARGET, jitter, profiled

REQUESTS, DEPTH = 2, 4
DRAFTED, VERIFIED = REQUESTS, REQUESTS * (DEPTH + 1)

Slow = Callable[[str, int], float]


def machine() -> PerfModel:
    known = PerfModel()
    known.learn("drafter", profiled(DRAFTER))
    known.learn("target", profiled(TARGET))
    return known


def serve(known: PerfModel, cycles: int, slow: Slow, noise: Iterator[float]) -> None:
    """Cycles of two requests whose drafts are verified, on a machine that slows some forwards."""
    for _ in range(cycles):
        for name, curve, tokens in [("drafter", DRAFTER, DRAFTED)] * DEPTH + [
            ("target", TARGET, VERIFIED)
        ]:
            attended = tokens * 128.0
            ms = curve.at(tokens, attended) * slow(name, tokens) * next(noise)
            known.record(name, tokens, attended, ms)
        known.end_cycle()


def alone(known: PerfModel, cycles: int, factor: float = 1.0) -> None:
    """Cycles without drafts."""
    for _ in range(cycles):
        known.record("target", REQUESTS, 256.0, factor * TARGET.at(REQUESTS, 256.0))
        known.end_cycle()


def alike(name: str, tokens: int) -> float:
    return 1.0


def ratio(known: PerfModel) -> float:
    found = known.models()
    return found["target"].at(VERIFIED) / found["drafter"].at(DRAFTED)


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("factor", [1.3, 2.0, 3.0])
def test_a_burst_on_all_models_changes_no_ratio(factor: float, noise: float) -> None:
    known, chance = machine(), jitter(noise)
    serve(known, 60, alike, chance)
    before, quiet = ratio(known), known.models()["target"].at(VERIFIED)
    serve(known, 10, lambda *_: factor, chance)
    assert known.slowdown == pytest.approx(factor, rel=0.06)
    for _ in range(10):
        assert ratio(known) == pytest.approx(before, rel=0.03)
        serve(known, 1, alike, chance)
    assert ratio(known) == pytest.approx(before, rel=0.03)
    assert known.models()["target"].at(VERIFIED) == pytest.approx(quiet, rel=0.05)
    serve(known, 10, alike, chance)
    assert known.slowdown == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0])
@pytest.mark.parametrize("changed", ["drafter", "target"])
def test_a_lasting_change_of_one_model_is_followed(changed: str, factor: float) -> None:
    known, quiet = machine(), jitter(0.0)
    serve(known, 40, alike, quiet)
    sizes = {"drafter": DRAFTED, "target": VERIFIED}
    before = {name: known.models()[name].at(tokens) for name, tokens in sizes.items()}
    forwards = DEPTH if changed == "drafter" else 1
    serve(known, 224 // forwards, lambda name, _: factor if name == changed else 1.0, quiet)
    for name, ms in before.items():
        expected = ms * (factor if name == changed else 1.0)
        assert known.models()[name].at(sizes[name]) == pytest.approx(expected, rel=0.05)
    assert known.slowdown == pytest.approx(1.0, abs=0.05)


def test_a_burst_while_nobody_drafts_changes_the_ratio_little_and_not_for_long() -> None:
    known = machine()
    serve(known, 60, alike, jitter(0.0))
    before = ratio(known)
    alone(known, 10, 2.0)
    assert known.slowdown == pytest.approx(2.0, rel=0.1)
    assert ratio(known) == pytest.approx(before, rel=0.1)
    alone(known, 20)
    assert ratio(known) == pytest.approx(before, rel=0.02)


def test_work_around_forwards_says_nothing_of_the_machine_but_is_as_slow() -> None:
    known, quiet = machine(), jitter(0.0)
    for factor in (1.0, 2.0):
        for _ in range(40):
            known.record_stage("verify", 10, 3.0 * factor)
            serve(known, 1, lambda *_, factor=factor: factor, quiet)
    assert known.slowdown > 1.8  # and the rest is usual by now
    assert known.slowdown * known.stages()["verify"].at(10) == pytest.approx(6.0, rel=0.05)
    assert "verify" not in known.models()


def test_curves_do_not_drift_in_noise() -> None:
    known, chance = machine(), jitter(0.1)
    serve(known, 100, alike, chance)
    before = known.models()
    serve(known, 1000, alike, chance)
    for name, curve in known.models().items():
        for tokens in SIZES:
            assert curve.at(tokens) == pytest.approx(before[name].at(tokens), rel=0.1)


def test_a_model_first_met_in_a_burst_is_known_as_of_the_quiet_machine() -> None:
    known = PerfModel()
    known.learn("target", profiled(TARGET))
    for cycle in range(25):
        known.record("target", VERIFIED, 0.0, 2.0 * TARGET.at(VERIFIED))
        if cycle >= 20:
            known.record("drafter", DRAFTED, 0.0, 2.0 * DRAFTER.at(DRAFTED))
        known.end_cycle()
    found = known.models()
    ratio = found["target"].at(VERIFIED) / found["drafter"].at(DRAFTED)
    assert ratio == pytest.approx(TARGET.at(VERIFIED) / DRAFTER.at(DRAFTED), rel=0.1)


def test_a_model_that_was_hardly_recorded_has_no_curve() -> None:
    known = PerfModel()
    known.record("drafter", 1, 128.0, 1.0)
    known.end_cycle()
    assert dict(known.models()) == {}


def test_the_papers_average_is_one_scalar_a_model_whatever_the_size() -> None:
    known = machine()
    assert known.means_ms() == {"drafter": 1.0, "target": 10.0}  # of one token, by the profile
    for ms in (20.0, 40.0):
        known.record("target", 7, 0.0, ms)
        known.end_cycle(only_news=True)
    assert known.means_ms()["target"] == pytest.approx(0.95 * (0.95 * 10.0 + 0.05 * 20) + 0.05 * 40)


def test_a_slowdown_that_is_no_number_is_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    known = machine()
    serve(known, 5, alike, jitter(0.0))
    before = known.slowdown
    with monkeypatch.context() as patch:
        patch.setattr(PerfModel, "_common", lambda *_: (math.nan, math.nan))
        with pytest.raises(ArithmeticError):
            alone(known, 1)
    assert known.slowdown == before
    alone(known, 3)
    assert known.slowdown == pytest.approx(before)
