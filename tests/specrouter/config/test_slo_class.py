"""Classes of objectives in a configuration: what they hold, and which are refused by their key."""

from __future__ import annotations

from typing import Any

import pytest

from specrouter import RouterConfig
from specrouter.request.objective import SLO, Stage
from tests.specrouter.config.test_config import POOL, Settings, refused

CLASSES: Settings = {
    "interactive": {"tpot_ms": 50, "ttft_ms": 1000},
    "coding": {"tpot_ratio": 1.2},
    "batch": {"e2e_ms": 5000},
    "reasoning": {
        "stages": [{"tpot_ms": 20, "until_token": "</think>"}, {"tpot_ms": 60}],
        "on_unattainable": "reject",
    },
}
END_OF_THINKING = 7


def end_of_thinking(field: str, text: str) -> int:
    """The tokenizer knows this one token."""
    assert (field, text) == ("slo.stages[0].until_token", "</think>")
    return END_OF_THINKING


def test_classes_of_objectives_have_names() -> None:
    config = RouterConfig.load({"pool": POOL, "slo_classes": CLASSES})
    slos = {name: one.slo(end_of_thinking) for name, one in config.slo_classes.items()}
    assert slos == {
        "interactive": SLO(tpot_ms=50, ttft_ms=1000),
        "coding": SLO(tpot_ratio=1.2),
        "batch": SLO(e2e_ms=5000),
        "reasoning": SLO(
            stages=(Stage(20, until_token=END_OF_THINKING), Stage(60)), on_unattainable="reject"
        ),
    }


@pytest.mark.parametrize(
    ("classes", "field"),
    [
        ({"chat": {}}, "slo_classes.chat"),
        ({"chat": {"tpot_ms": 50, "tpot_ratio": 2}}, "slo_classes.chat.tpot_ratio"),
        ({"chat": 50}, "slo_classes.chat"),
        ({"": {"tpot_ms": 50}}, "slo_classes"),
        ({"none": {"tpot_ms": 50}}, "slo_classes.none"),
        ({"default": {"tpot_ms": 50}}, "slo_classes.default"),
        ([], "slo_classes"),
        ({"chat": {"tpot_ms": 50, "on_unattainable": "wait"}}, "slo_classes.chat.on_unattainable"),
        ({"chat": {"on_unattainable": "reject"}}, "slo_classes.chat"),
        ({"chat": {"stages": [{"tpot_ms": -1}]}}, "slo_classes.chat.stages[0].tpot_ms"),
        ({"chat": {"stages": [{"tpot_ms": 50}] * 2}}, "slo_classes.chat.stages[0]"),
        ({"chat": {"stages": [{"tpot_ms": 5, "until": 1}]}}, "slo_classes.chat.stages[0].until"),
        ({"chat": {"tpot_ms": 50, "stages": [{"tpot_ms": 5}]}}, "slo_classes.chat.tpot_ms"),
    ],
)
def test_a_class_that_cannot_be_asked_for_names_itself(classes: Any, field: str) -> None:
    assert refused({"pool": POOL, "slo_classes": classes}).field == field
