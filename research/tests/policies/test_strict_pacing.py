"""The next batch: who decodes in it, and how much it reads of prompts."""

import numpy as np
import pytest

from research.policies.autoregressive import Autoregressive
from research.policies.strict_pacing import Strict
from specrouter.slo.serve.load import Load, Prompt
from specrouter.slo.serve.pacing import Memory
from specrouter.slo.serve.reservation import with_prompts
from tests.specrouter.slo_machines import OPT_7B

PLAIN = Autoregressive(OPT_7B, idle_ms=100.0)
PACES = np.array([50.0, 100.0])
TWO = Load(ids=(1, 2), due_ms=PACES, tpot_ms=PACES, left=np.full(2, 90.0), prompts=())


def test_a_loose_request_sits_out_while_its_token_may_wait() -> None:
    batch = PLAIN.batch(TWO, 50.0)
    assert (batch.ms, batch.tokens, batch.lengths.tolist()) == (50.0, 366, [1, 0])
    assert with_prompts(PLAIN, TWO, batch).room == 365


def test_prompts_are_read_by_earliest_deadline_in_what_is_left() -> None:
    load = TWO.joined(
        [
            Prompt(id=8, deadline_ms=900.0, tokens=300, tpot_ms=50.0),
            Prompt(id=9, deadline_ms=400.0, tokens=200, tpot_ms=50.0),
        ]
    )
    batch = with_prompts(PLAIN, load, PLAIN.batch(load, 50.0))
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
    batch = Strict(OPT_7B, 100.0, 0.7).batch(TWO, 0.0)
    tight, loose = batch.lengths.tolist()
    assert tight > loose >= 1
    assert batch.ms > 50.0
    assert Strict(OPT_7B, 100.0, 0.0).batch(TWO, 0.0).lengths.tolist() == [1, 1]


def test_a_margin_is_kept_of_every_pace() -> None:
    plain, careful = Strict(OPT_7B, 100.0, 0.7), Strict(OPT_7B, 100.0, 0.7, margin=0.3)
    assert careful.promised_ms == pytest.approx(plain.fastest_ms / 0.7)
    assert careful.batch(TWO, 0.0).ms < plain.batch(TWO, 0.0).ms
