"""What is left after a batch."""

import numpy as np

from specrouter.slo.serve.load import Load, Prompt

THREE = Load(
    ids=(1, 2, 3), due_ms=np.ones(3), tpot_ms=np.ones(3), left=np.full(3, 90.0), prompts=()
)


def test_a_batch_takes_from_what_is_due_and_what_is_left() -> None:
    load = THREE.joined(
        [Prompt(id=10 + n, deadline_ms=6.0, tokens=6, tpot_ms=1.0) for n in range(2)]
    )
    after = load.after(1.0, np.array([True, True, False]), [6, 2])
    assert after.ids == (1, 2, 3, 10)
    assert after.due_ms.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert [(each.deadline_ms, each.tokens) for each in after.prompts] == [(5.0, 4)]
