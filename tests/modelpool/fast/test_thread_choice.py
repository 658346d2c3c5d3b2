import itertools
from pathlib import Path

import pytest
import torch

from modelpool.fast.linear import can_pack
from modelpool.fast.thread_choice import OtherPrograms, ThreadChoice
from specrouter import ChainRouter, RouterConfig, SamplingParams
from test_support.families import pool_settings, save_family


class Machine:
    """Of two cores: a clock, what others use, and how long a forward takes then."""

    def __init__(self) -> None:
        self.now_s = self.all_s = 0.0
        self.others = 0.0

    def usage(self) -> tuple[float, float]:
        return self.all_s, 0.0

    def clock(self) -> float:
        return self.now_s

    def run(self, choice: ThreadChoice, tokens: int = 1) -> int:
        with choice.chosen(tokens):
            used = torch.get_num_threads()
            ms = 10.0 if used == 1 else 6.0 if self.others < 0.5 else 100.0
            self.pass_s(ms / 1000)
        return used

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.all_s += seconds * self.others


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def choice(machine: Machine) -> ThreadChoice:
    others = OtherPrograms(machine.usage, machine.clock)
    return ThreadChoice("m", 2, others, cores=2, most_tokens=32, clock=machine.clock)


def test_beside_a_busy_program_it_has_one_and_all_of_them_when_that_ends(
    machine: Machine, choice: ThreadChoice
) -> None:
    machine.others = 1.0
    used = [machine.run(choice) for _ in range(60)]
    assert used[-1] == 1
    assert used.count(2) < 10
    machine.others = 0.0
    machine.pass_s(2.0)
    assert {machine.run(choice) for _ in range(20)} == {2}


def test_it_compares_again(machine: Machine, choice: ThreadChoice) -> None:
    machine.others = 1.0
    for _ in range(60):
        machine.run(choice)
    machine.pass_s(60.0)
    assert 2 in [machine.run(choice) for _ in range(4)]


def test_what_others_did_while_no_forward_ran_counts_for_a_moment(
    machine: Machine, choice: ThreadChoice
) -> None:
    """As where another server has answered the request before."""
    machine.run(choice)
    machine.others = 2.0
    machine.pass_s(3.0)
    machine.others = 0.0
    assert [machine.run(choice) for _ in range(40)].count(1) <= 4


HAS_BFLOAT16 = pytest.mark.skipif(not can_pack(torch.bfloat16), reason="no kernels of bfloat16")


@HAS_BFLOAT16
def test_texts_stay_when_threads_change_in_the_middle_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_settings(save_family(tmp_path))
    for member in pool["models"]:
        member |= {"threads": 2, "dtype": "bfloat16"}
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9], list(range(20, 60))]
    params = [
        SamplingParams(max_new_tokens=24, temperature=temperature, seed=3)
        for temperature in (0.0, 1.0, 1.0)
    ]
    with ChainRouter.from_config(RouterConfig.load({"pool": pool})) as router:
        before = [output.token_ids for output in router.generate(prompts, params)]
        used = set[int]()
        turns = itertools.cycle((1, 2, 2, 1, 1, 2))

        def alternate(choice: ThreadChoice) -> int:
            count = next(turns)
            used.add(count)
            return count

        monkeypatch.setattr(ThreadChoice, "threads", alternate)
        after = [output.token_ids for output in router.generate(prompts, params)]
    assert after == before
    assert used == {1, 2}
