"""Studies count what they say that they count."""

import pytest
import torch

from modelpool.fast.direct_forward import direct_forward_of
from modelpool.packed_model import PackedModel
from research.studies.fidelity import Kept, kept, overrun, table
from research.studies.token_profile import PartTimes, watched
from specrouter.bench.replay import ReplayAnswer, ReplayOutcome
from test_support.llama_models import LLAMA_SHAPED, VOCAB, Feeder, make_model
from tests.load_requests import load_request


def _outcome(ttft_ms: float, tpot_ms: float, error: str | None = None) -> ReplayOutcome:
    """Asked for 100 ms and 20 ms."""
    asked = load_request(
        category="any",
        token_ids=(1,),
        new_tokens=8,
        temperature=0.0,
        objective_ms=20.0,
        ttft_ms=100.0,
    )
    return ReplayOutcome(
        asked, 0.0, ReplayAnswer(ttft_ms=ttft_ms, tpot_ms=tpot_ms, tokens=8, error=error)
    )


def test_only_what_was_promised_is_held_to_it() -> None:
    found = [_outcome(90, 19), _outcome(105, 19), _outcome(90, 30), _outcome(200, 40, "lost")]
    assert [overrun(one) for one in found] == pytest.approx([0.95, 1.05, 1.5, 2.0])
    promised = [True, True, True, False]
    assert kept(promised, found) == Kept(admitted=3, missed=2, far=1, ended=3)


def test_the_table_has_medians_of_rounds_and_sums_of_what_was_admitted() -> None:
    def line(live: float, simulated: float) -> dict[str, object]:
        of_policy = {
            "live": {"attainment": live},
            "simulated": {"attainment": simulated},
            "promised": {"admitted": 10, "missed": 2, "far": 1},
        }
        return {"load": 1.5, "policies": {"slo": of_policy}}

    shown = table([line(0.5, 0.6), line(0.3, 0.6), line(0.4, 0.9)]).splitlines()
    assert shown[1].split() == ["1.50", "slo", "40.0%", "60.0%", "50/60", "30/60", "40/90"]
    assert shown[2].strip() == "promised 30, missed 6, by over 10% 3"


def test_a_clocked_forward_has_the_same_bits_and_names_its_parts() -> None:
    packed = PackedModel.wrap("m", make_model(LLAMA_SHAPED["qwen3"](), torch.float32), VOCAB)
    direct, clock = direct_forward_of(packed), PartTimes()
    assert direct is not None
    forwards = direct, watched(direct, clock)
    expected, got = (Feeder(one, packed).feed({0: 3, 2: 1}) for one in forwards)
    assert torch.equal(got, expected)
    assert {"norms", "query, key, value", "attention", "down", "head"} <= clock.ms.keys()
