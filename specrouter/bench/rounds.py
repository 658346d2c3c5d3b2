"""Rounds: every contender in turn on each batch of a round."""

from collections.abc import Callable, Sequence
from itertools import product

from specrouter.bench.contenders import Contender
from specrouter.bench.progress import Progress
from specrouter.bench.prompts import Work
from specrouter.bench.sample import MeasurementError, Sample

Deal = Callable[[int], Sequence[Work]]  # the work of a round, by its number


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
    dealt = [deal(number % rounds) for number in range(-1, rounds)]
    progress.expect(sum(map(len, dealt)) * len(contenders))
    for number, works in enumerate(dealt, -1):
        where = f"{label}, round {number + 1}/{rounds}" if number >= 0 else f"{label}, warm-up"
        of_round: dict[str, list[Sample]] = {name: [] for name in samples}
        for work, contender in product(works, contenders):
            name = contender.name
            progress.show(f"{where}: {name}")
            try:
                if name not in left_out:
                    of_round[name].append(contender.run(work))
            except MeasurementError as error:
                if number >= 0 or not may_fail(name):
                    raise
                left_out[name] = str(error)
                progress.note(f"{label}: left out {error}")
            progress.step()
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
