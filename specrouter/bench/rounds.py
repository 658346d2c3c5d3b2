"""Rounds: contenders that take turns on the same work."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

from specrouter.bench.contenders import Contender
from specrouter.bench.figures import speeds
from specrouter.bench.prompts import Work
from specrouter.bench.sample import Sample
from specrouter.progress import Progress


def measure(
    contenders: Sequence[Contender],
    deal: Callable[[int], Sequence[Work]],
    rounds: int,
    label: str,
    progress: Progress,
) -> dict[str, list[list[Sample]]]:
    """Samples by contender, [round][batch of the round]. A round before the first one warms up.

    Args:
        deal: the work of a round, by its number.

    Raises:
        MeasurementError: a contender failed.
    """
    samples: dict[str, list[list[Sample]]] = {one.name: [] for one in contenders}
    dealt = [deal(number % rounds) for number in range(-1, rounds)]
    progress.expect(sum(map(len, dealt)) * len(contenders))
    for number, works in enumerate(dealt, -1):
        where = f"{label}, round {number + 1}/{rounds}" if number >= 0 else f"{label}, warm-up"
        of_round: dict[str, list[Sample]] = {name: [] for name in samples}
        for work, contender in product(works, contenders):
            progress.show(f"{where}: {contender.name}")
            of_round[contender.name].append(contender.run(work))
            progress.step()
        if number >= 0:
            for name, found in of_round.items():
                samples[name].append(found)
        progress.note(f"{where}: {_summary(of_round)}")
    return samples


def _summary(of_round: Mapping[str, Sequence[Sample]]) -> str:
    parts = (f"{name} {speeds([found])[0]:.1f}" for name, found in of_round.items())
    return ", ".join(parts) + " tokens/s"
