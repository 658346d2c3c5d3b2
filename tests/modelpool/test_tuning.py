"""What suits a member follows from its size, its part and its place; a target keeps its bits."""

from dataclasses import replace
from typing import Any

import pytest

from modelpool.config import ModelConfig
from modelpool.tuning import Role, Tuning, dtype_for, tuning_for

DRAFTER = Role(parameter_count=1_000_000, stored_bytes=2_000_000, is_target=False, on_cpu=True)


def config(**options: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "source": "bundled:m", **options})


def test_a_small_half_precision_drafter_on_the_cpu_runs_in_float32() -> None:
    assert dtype_for(config(), DRAFTER) == "float32"


@pytest.mark.parametrize(
    "role",
    [
        replace(DRAFTER, is_target=True),
        replace(DRAFTER, on_cpu=False),
        replace(DRAFTER, parameter_count=8_000_000, stored_bytes=16_000_000),
        replace(DRAFTER, stored_bytes=8_000_000),  # float64: somebody wants it exact
    ],
)
def test_any_other_member_keeps_the_dtype_of_its_checkpoint(role: Role) -> None:
    assert dtype_for(config(), role) == "auto"


def test_a_dtype_that_was_asked_for_is_used() -> None:
    assert dtype_for(config(dtype="bfloat16"), DRAFTER) == "bfloat16"


@pytest.mark.parametrize(
    ("role", "threads"),
    [
        (DRAFTER, 1),
        (replace(DRAFTER, parameter_count=4_000_000), 6),
        (replace(DRAFTER, is_target=True), 6),
        (replace(DRAFTER, on_cpu=False), 6),
    ],
)
def test_only_a_small_drafter_on_the_cpu_has_one_thread(role: Role, threads: int) -> None:
    for asked, expected in ((None, threads), (3, 3)):
        tuning = tuning_for(config(threads=asked), role, default_threads=6, pack_weights=True)
        assert tuning == Tuning(expected, True, lean=role.is_cpu_drafter)
