"""Decisions of a recorded run, decided again by the code of this tree; and that a loss is seen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from research.replay.__main__ import main
from research.replay.adapter import Answer, Decider
from research.replay.compare import Compared, Figures, Measured, decide_again, loss
from research.replay.facts import Fact
from research.replay.recording import FOLDER, SUFFIX, Phase, Recording, Round

SMALL = "cpu-chains"
MOST = 80  # decisions


@pytest.fixture(scope="module")
def recording() -> Recording:
    return Recording.load(FOLDER / f"{SMALL}{SUFFIX}")


class Broken(Decider):
    """Always the target alone."""

    def decide(self, view: Any, question: Fact, current: Any | None) -> Answer:
        answer = super().decide(view, question, current)
        chain, *shape = answer.route
        return Answer((chain[-1:], *shape), answer.reason, answer.state)  # type: ignore[arg-type]


def test_no_more_is_lost_than_by_the_recorded_decisions(recording: Recording) -> None:
    figures = Figures.of(decide_again(recording, most=MOST))
    assert figures.scored > MOST / 4
    assert figures.loss_now <= figures.loss + 0.01


def test_a_broken_scheduler_is_caught(recording: Recording) -> None:
    figures = Figures.of(decide_again(recording, most=MOST, decider_of=Broken))
    assert figures.loss_now > figures.loss + 0.01
    assert figures.same_chain < 0.95


def test_the_command_says_so_in_its_exit_code_and_its_last_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([SMALL, "--first", "10"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["recordings"]["total"]["decisions"] == 10
    assert main([SMALL, "--first", "10", "--same", "--least-same", "1.01"]) == 1
    assert main(["no-such-recording"]) == 2


def test_a_chain_brings_the_median_of_its_rounds_at_about_the_same_batch() -> None:
    phases = [Phase("static", ("t",), 4, "code"), Phase("static", ("d", "t"), 4, "code")]
    rounds = [Round(0, 10, 10.0), Round(1, 20, 10.0), Round(1, 30, 10.0), Round(1, 90, 10.0)]
    measured = Measured.of(Recording(name="r", phases=phases, rounds=rounds))
    rates = measured.at(Phase("adaptive", None, 4, "code"), 5)
    assert rates == {("t",): 1.0, ("d", "t"): 3.0}
    assert loss(rates, ("t",)) == pytest.approx(2 / 3)
    assert loss(rates, ("d", "t")) == 0.0
    assert loss(rates, ("e", "t")) is None
    assert measured.at(Phase("adaptive", None, 4, "code"), 6) is None
    assert measured.at(Phase("adaptive", None, 4, "prose"), 4) is None


def test_means_are_over_what_is_scored_and_shares_over_everything() -> None:
    one, other = (("t",), 1, 1, 0, 1), (("d", "t"), 3, 1, 2, 1)
    wide = (("d", "t"), 3, 2, 2, 1)
    figures = Figures.of(
        [
            Compared(one, one, 0.2, 0.5),
            Compared(one, other, 0.4, 0.5),
            Compared(other, wide, None, None),
            Compared(other, one, None, None),
        ]
    )
    assert (figures.decisions, figures.scored) == (4, 2)
    assert (figures.same_chain, figures.same_route) == (0.5, 0.25)
    assert figures.regret == pytest.approx(0.2)
    assert figures.loss_now == pytest.approx(0.3)
    assert figures.loss == 0.5
