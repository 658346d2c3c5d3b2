"""SpecRouter's Table 2 (arXiv 2505.07680): speed-up over the target alone, by batch."""

from research.figures.cell import Cell
from research.figures.figure import Axis, Figure, Scope

BATCHES = (1, 4, 8, 16, 32, 64)
_POLICIES = ("two-level", "three-level", "paths", "goodput")


def _batches(scope: Scope) -> list[Cell]:
    return [
        Cell(
            machine="specrouter-llama2-7b",
            workload="batch",
            policy=policy,
            rate=float(batch),
            requests=batch,
            seed=seed,
            measure="speed-up",
        )
        for batch in scope.pick(BATCHES, (1, 16))
        for policy in _POLICIES
        for seed in scope.all_seeds
    ]


FIGURES = (
    Figure(
        name="specrouter-table-2",
        title="SpecRouter table 2: speed-up over the target alone",
        cells=_batches,
        axis=Axis("requests", "requests in a batch", (("speed_up", "speed-up"),)),
        published=(
            "batches of 1 4 8 16 32 64: two-level 1.49 1.45 1.38 1.31 1.25 0.99; three-level 1.11 "
            "1.34 1.33 1.20 1.06 1.37; SpecRouter 1.57 1.69 1.64 1.91 1.52 1.77."
        ),
        assumed=(
            "Times and acceptances are fitted to the two static rows (8% off in the root mean "
            "square); `paths`, routed as SpecRouter's chains are, and `goodput`, our default with "
            "trees, are predicted."
        ),
    ),
)
