"""Rounds: every contender in turn on each batch of a round."""

import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from specrouter.bench.contenders import Contender
from specrouter.bench.prompts import Work
from specrouter.bench.sample import MeasurementError, Sample

Deal = Callable[[int], Sequence[Work]]  # the work of a round, by its number


class Progress:
    """One line on stderr that changes; where that is no terminal, a line for each round."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._line = ""

    def show(self, text: str) -> None:
        if self._stream.isatty():
            print(f"\r{text:{len(self._line)}}", end="", file=self._stream, flush=True)
            self._line = text

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._line:
            self.show("")
            print("\r", end="", file=self._stream)
            self._line = ""
        print(text, file=self._stream, flush=True)


def measure(
    contenders: Sequence[Contender],
    deal: Deal,
    rounds: int,
    label: str,
    progress: Progress,
    may_fail: Callable[[str], bool] = lambda name: False,
) -> tuple[dict[str, list[list[Sample]]], dict[str, str]]:
    """Samples by contender, [round][batch of the round], and why contenders were left out.

    A round before the first one warms up. Contenders that `may_fail` are left out if they do so
    there; any other failure raises `MeasurementError`.
    """
    samples: dict[str, list[list[Sample]]] = {one.name: [] for one in contenders}
    left_out: dict[str, str] = {}
    for number in range(-1, rounds):
        where = f"{label}, round {number + 1}/{rounds}" if number >= 0 else f"{label}, warm-up"
        of_round: dict[str, list[Sample]] = {name: [] for name in samples}
        for work in deal(number % rounds):
            for contender in contenders:
                name = contender.name
                if name in left_out:
                    continue
                progress.show(f"{where}: {name}")
                try:
                    of_round[name].append(contender.run(work))
                except MeasurementError as error:
                    if number >= 0 or not may_fail(name):
                        raise
                    left_out[name] = str(error)
                    progress.note(f"{label}: left out {error}")
        if number >= 0:
            for name, found in of_round.items():
                samples[name].append(found)
        progress.note(f"{where}: {_summary(of_round)}")
    return {name: samples[name] for name in samples if name not in left_out}, left_out


def _summary(of_round: dict[str, list[Sample]]) -> str:
    parts = []
    for name, found in of_round.items():
        if found:
            speed = sum(one.tokens for one in found) / sum(one.seconds for one in found)
            parts.append(f"{name} {speed:.1f}")
    return ", ".join(parts) + " tokens/s"
