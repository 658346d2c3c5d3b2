"""What suits a member follows from its size, its part and its place; a target keeps its bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modelpool.config import ModelConfig
from modelpool.fast.cpu import computes_in
from modelpool.fast.tuning import Role, Tuning, dtype_for, tuning_for

DRAFTER = Role(
    parameter_count=1_000_000, dtype="bfloat16", is_quantized=False, is_target=False, on_cpu=True
)
LARGE = replace(DRAFTER, parameter_count=8_000_000)
TARGET = replace(LARGE, is_target=True)


def every(dtype: str) -> bool:
    """A CPU that computes in whatever it is asked for."""
    return True


def no_halves(dtype: str) -> bool:
    """A CPU with AVX2 alone."""
    return dtype in ("float32", "float64")


def config(**options: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "source": "bundled:m", **options})


def test_a_small_half_precision_drafter_on_the_cpu_runs_in_float32() -> None:
    assert dtype_for(config(), DRAFTER, every) == "float32"


@pytest.mark.parametrize(
    "role",
    [
        replace(DRAFTER, is_target=True),
        replace(DRAFTER, on_cpu=False),
        LARGE,
        TARGET,
        replace(DRAFTER, dtype="float64"),  # somebody wants it exact
        replace(DRAFTER, is_quantized=True),
    ],
)
def test_any_other_member_keeps_the_dtype_of_its_checkpoint(role: Role) -> None:
    assert dtype_for(config(), role, every) == "auto"


@pytest.mark.parametrize("role", [DRAFTER, LARGE, TARGET, replace(TARGET, dtype="float16")])
def test_where_the_cpu_would_emulate_a_half_precision_every_member_runs_in_float32(
    role: Role,
) -> None:
    assert dtype_for(config(), role, no_halves) == "float32"
    assert dtype_for(config(), replace(role, on_cpu=False), no_halves) == "auto"
    for dtype in ("float32", "float64"):
        assert dtype_for(config(), replace(role, dtype=dtype), no_halves) == "auto"
    assert dtype_for(config(), replace(role, is_quantized=True), no_halves) == "auto"


def test_a_dtype_that_was_asked_for_is_used() -> None:
    for role in (DRAFTER, TARGET):
        assert dtype_for(config(dtype="bfloat16"), role, no_halves) == "bfloat16"


@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("has_library", [False, True])
def test_a_cpu_computes_in_a_half_precision_that_its_library_has_kernels_for(
    has_library: bool, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}
    for asked, operator in operators.items():
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_library)
        for name in operators.values():
            answer = has_kernels if name == operator else not has_kernels
            monkeypatch.setattr(torch.ops.mkldnn, name, lambda answer=answer: answer, raising=False)
        assert computes_in.__wrapped__(asked) is (has_library and has_kernels)
        assert computes_in.__wrapped__("float32") is computes_in.__wrapped__("float64") is True


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
        assert tuning == Tuning(
            threads=expected, pack_weights=True, lean=role.is_cpu_drafter, is_target=role.is_target
        )
