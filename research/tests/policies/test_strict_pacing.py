"""The next batch: who decodes in it, and how much it reads of prompts."""

import numpy as np
import pytest

from research.policies.autoregressive import Autoregressive, TimedChoice
from research.policies.strict_pacing import Strict, after
from specrouter.slo.serve.load import Load, Prompt
from specrouter.slo.serve.pacing import Choice, Memory
from tests.specrouter.slo_machines import OPT_7B

PLAIN = Autoregressive(OPT_7B, idle_ms=100.0)
AT_50 = TimedChoice(batch_ms=50.0)
PACES = np.array([50.0, 100.0])
TWO = Load(ids=(1, 2), due_ms=PACES, tpot_ms=PACES, left=np.full(2, 90.0), prompts=())


def test_a_loose_request_sits_out_while_its_token_may_wait() -> None:
    batch = PLAIN.batch(TWO, AT_50)
    assert (batch.ms, batch.tokens, batch.lengths.tolist()) == (50.0, 366, [1, 0])
    assert PLAIN.batch(TWO, AT_50).room == 365


def test_prompts_are_read_by_earliest_deadline_in_what_is_left() -> None:
    load = TWO.joined(
        [
            Prompt(id=8, deadline_ms=900.0, tokens=300, tpot_ms=50.0),
            Prompt(id=9, deadline_ms=400.0, tokens=200, tpot_ms=50.0),
        ]
    )
    batch = PLAIN.batch(load, AT_50)
    assert [prompt.id for prompt in load.prompts] == [9, 8]
    assert batch.chunks == (199, 166), "the last token of the first waits: nothing is idle"


def test_rows_and_memory_bound_who_is_admitted() -> None:
    new = [
        Prompt(id=n, deadline_ms=2000.0, tokens=100, tpot_ms=50.0, kv_tokens=400) for n in range(4)
    ]
    assert len(PLAIN.choose(TWO, new, Memory(9)).admitted) == 4
    assert len(PLAIN.choose(TWO, new, Memory(3)).admitted) == 3
    assert len(PLAIN.choose(TWO, new, Memory(9, 1000)).admitted) == 2


def test_speculation_gives_each_tier_its_length() -> None:
    batch = Strict(OPT_7B, 100.0, 0.7).batch(TWO, Choice())
    tight, loose = batch.lengths.tolist()
    assert tight > loose >= 1
    assert batch.ms > 50.0
    assert Strict(OPT_7B, 100.0, 0.0).batch(TWO, Choice()).lengths.tolist() == [1, 1]


def test_a_margin_is_kept_of_every_pace() -> None:
    plain, careful = Strict(OPT_7B, 100.0, 0.7), Strict(OPT_7B, 100.0, 0.7, margin=0.3)
    assert careful.promised_ms == pytest.approx(plain.fastest_ms / 0.7)
    assert careful.batch(TWO, Choice()).ms < plain.batch(TWO, Choice()).ms


THREE = Load(
    ids=(1, 2, 3), due_ms=np.ones(3), tpot_ms=np.ones(3), left=np.full(3, 90.0), prompts=()
)


def test_a_batch_takes_from_what_is_due_and_what_is_left() -> None:
    load = THREE.joined(
        [Prompt(id=10 + n, deadline_ms=6.0, tokens=6, tpot_ms=1.0) for n in range(2)]
    )
    left = after(load, 1.0, np.array([True, True, False]), [6, 2])
    assert left.ids == (1, 2, 3, 10)
    assert left.due_ms.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert [(each.deadline_ms, each.tokens) for each in left.prompts] == [(5.0, 4)]
