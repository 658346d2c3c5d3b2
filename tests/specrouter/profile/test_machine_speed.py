"""What slows all models alike moves no curve, and what stays with one model or size moves that."""

from collections.abc import Callable, Iterator

import pytest

from specrouter.profile.machine_speed import MachineTimes
from tests.specrouter.forward_times import DRAFTER, SIZES, TARGET, jitter, profiled

REQUESTS, DEPTH = 2, 4
DRAFTED, VERIFIED = REQUESTS, REQUESTS * (DEPTH + 1)

Slow = Callable[[str, int], float]


def machine() -> MachineTimes:
    return MachineTimes({"drafter": profiled(DRAFTER), "target": profiled(TARGET)})


def serve(known: MachineTimes, cycles: int, slow: Slow, noise: Iterator[float]) -> None:
    """Cycles of two requests whose drafts are verified, on a machine that slows some forwards."""
    for _ in range(cycles):
        for name, curve, tokens in [("drafter", DRAFTER, DRAFTED)] * DEPTH + [
            ("target", TARGET, VERIFIED)
        ]:
            attended = tokens * 128.0
            ms = curve.at(tokens, attended) * slow(name, tokens) * next(noise)
            known.record(name, tokens, attended, ms)


def alike(name: str, tokens: int) -> float:
    return 1.0


def ratio(known: MachineTimes) -> float:
    found = known.curves()
    return found["target"].at(VERIFIED) / found["drafter"].at(DRAFTED)


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("factor", [1.3, 2.0, 3.0])
def test_a_burst_on_all_models_changes_no_ratio(factor: float, noise: float) -> None:
    known, chance = machine(), jitter(noise)
    serve(known, 60, alike, chance)
    before, quiet = ratio(known), known.curves()["target"].at(VERIFIED)
    serve(known, 10, lambda *_: factor, chance)
    assert known.speed.factor == pytest.approx(factor, rel=0.05)
    for _ in range(10):
        assert ratio(known) == pytest.approx(before, rel=0.03)
        serve(known, 1, alike, chance)
    assert ratio(known) == pytest.approx(before, rel=0.03)
    assert known.curves()["target"].at(VERIFIED) == pytest.approx(quiet, rel=0.05)
    serve(known, 10, alike, chance)
    assert known.speed.factor == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0])
@pytest.mark.parametrize("changed", ["drafter", "target"])
def test_a_lasting_change_of_one_model_is_followed(changed: str, factor: float) -> None:
    known, quiet = machine(), jitter(0.0)
    serve(known, 40, alike, quiet)
    before = {name: curve.at(DRAFTED) for name, curve in known.curves().items()}
    forwards = DEPTH if changed == "drafter" else 1
    serve(known, 112 // forwards, lambda name, _: factor if name == changed else 1.0, quiet)
    for name, ms in before.items():
        expected = ms * (factor if name == changed else 1.0)
        assert known.curves()[name].at(DRAFTED) == pytest.approx(expected, rel=0.05)
    assert known.speed.factor == pytest.approx(1.0, abs=0.05)


def test_a_lasting_change_of_large_packs_alone_is_followed() -> None:
    known, quiet = machine(), jitter(0.0)
    for _ in range(120):
        serve(known, 1, lambda _, tokens: 1.5 if tokens == VERIFIED else 1.0, quiet)
        known.record("target", 1, 128.0, TARGET.at(1, 128.0))
    curve = known.curves()["target"]
    assert curve.at(VERIFIED, 1280.0) == pytest.approx(1.5 * TARGET.at(VERIFIED, 1280.0), rel=0.05)
    assert curve.at(1, 128.0) == pytest.approx(TARGET.at(1, 128.0), rel=0.01)


def test_a_machine_that_is_faster_for_good_becomes_the_quiet_one() -> None:
    known, quiet = machine(), jitter(0.0)
    serve(known, 40, alike, quiet)
    before = ratio(known)
    for _ in range(10):
        serve(known, 20, lambda *_: 0.5, quiet)
        assert ratio(known) == pytest.approx(before, rel=0.06)
    assert ratio(known) == pytest.approx(before, rel=0.01)
    assert known.curves()["target"].at(VERIFIED) == pytest.approx(
        0.5 * TARGET.at(VERIFIED), rel=0.1
    )


def test_curves_do_not_drift_in_noise() -> None:
    known, chance = machine(), jitter(0.1)
    serve(known, 100, alike, chance)
    before = known.curves()
    serve(known, 1000, alike, chance)
    for name, curve in known.curves().items():
        for tokens in SIZES:
            assert curve.at(tokens) == pytest.approx(before[name].at(tokens), rel=0.1)


def test_a_model_first_met_in_a_burst_is_known_as_of_the_quiet_machine() -> None:
    known = MachineTimes({"target": profiled(TARGET)})
    for _ in range(20):
        known.record("target", VERIFIED, 0.0, 2.0 * TARGET.at(VERIFIED))
    for _ in range(5):
        known.record("drafter", DRAFTED, 0.0, 2.0 * DRAFTER.at(DRAFTED))
    assert known.curves()["drafter"].at(DRAFTED) == pytest.approx(DRAFTER.at(DRAFTED), rel=0.05)


def test_a_model_that_was_never_recorded_has_no_curve() -> None:
    known = MachineTimes()
    known.record("drafter", 1, 128.0, 1.0)
    assert dict(known.curves()) == {}
