"""Models that fail rest for 4 cycles, then 8, up to 1,024, until they do well."""

from specrouter.cycle import Commit, CycleResult, ModelFailure
from specrouter.engine.quarantine import BackOff, Quarantine

NAMES = ("small", "middle", "target")


def failure(name: str) -> ModelFailure:
    return ModelFailure(name, RuntimeError("on fire"))


def rests(quarantine: Quarantine, cycle: int) -> set[str]:
    return set(NAMES) - quarantine.available(NAMES, cycle)


def test_a_rest_is_twice_as_long_each_time_up_to_1024_cycles() -> None:
    rest, lengths = BackOff(), []
    assert not rest.lasts(0)
    for _ in range(10):
        rest = rest.longer(100)
        lengths.append(rest.cycles)
        assert rest.lasts(100 + rest.cycles - 1)
        assert not rest.lasts(100 + rest.cycles)
    assert lengths == [4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]


def test_a_model_that_rested_may_be_tried_and_rests_longer_if_it_fails_again() -> None:
    quarantine = Quarantine()
    quarantine.add(failure("small"), 10)
    assert [rests(quarantine, cycle) for cycle in (10, 13, 14)] == [{"small"}, {"small"}, set()]
    assert "small" in quarantine, "none of its forwards was good since"
    quarantine.add(failure("small"), 14)
    assert [rests(quarantine, cycle) for cycle in (21, 22)] == [{"small"}, set()]


def test_who_does_well_begins_anew() -> None:
    quarantine = Quarantine()
    for cycle in (0, 4):
        quarantine.add(failure("small"), cycle)
    commits = [Commit(row=0, tokens=[5], chain=("small", "middle", "target"))]
    quarantine.learn(CycleResult(commits=commits, failures=[failure("middle")]), 8)
    assert "middle" in quarantine, "it took part and failed"
    assert "small" not in quarantine
    quarantine.add(failure("small"), 20)
    assert rests(quarantine, 24) == set()


def test_several_failures_of_a_cycle_are_one_rest() -> None:
    quarantine = Quarantine()
    several = [failure("small"), failure("small"), failure("middle")]
    quarantine.learn(CycleResult(failures=several), 0)
    assert rests(quarantine, 3) == {"small", "middle"}
    assert rests(quarantine, 4) == set()
    assert quarantine.counts == {"small": 1, "middle": 1}
