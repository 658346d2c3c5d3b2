"""What suits a member follows from its size, its part and its place; a target keeps its bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modelpool.checkpoint.bundled import bundled_root
from modelpool.checkpoint.footprint import CheckpointFacts, kv_dtype_of, read_checkpoint
from modelpool.config import KeptWeights, KVDtype, ModelConfig
from modelpool.fast.cpu import computes_in
from modelpool.fast.tuning import Tuning, dtype_for, tuning_for

SMALL = replace(
    read_checkpoint(bundled_root() / "tiny-1m", field="it"),
    parameter_count=1_000_000,
    dtype="bfloat16",
)
LARGE = replace(SMALL, parameter_count=8_000_000)


def every(dtype: str) -> bool:
    """A CPU that computes in whatever it is asked for."""
    return True


def config(**options: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "source": "bundled:m", **options})


@pytest.mark.parametrize(
    ("facts", "is_target"),
    [
        (SMALL, True),
        (LARGE, False),
        (LARGE, True),
        (replace(SMALL, dtype="float64"), False),  # somebody wants it exact
        (replace(SMALL, stored="other"), False),  # quantised by what transformers runs
    ],
)
def test_any_other_member_keeps_the_dtype_of_its_checkpoint(
    facts: CheckpointFacts, is_target: bool
) -> None:
    assert dtype_for(config(), facts, is_target, every) == "auto"


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
    ("parameters", "is_target", "on_cpu", "threads"),
    [
        (1_000_000, False, True, 1),
        (4_000_000, False, True, 6),
        (1_000_000, True, True, 6),
        (1_000_000, False, False, 6),
    ],
)
def test_only_a_small_drafter_on_the_cpu_has_one_thread(
    parameters: int, is_target: bool, on_cpu: bool, threads: int
) -> None:
    facts, where = replace(SMALL, parameter_count=parameters), (is_target, on_cpu)
    for asked, expected in ((None, threads), (3, 3)):
        tuning = tuning_for(
            config(threads=asked), facts, is_target=is_target, on_cpu=on_cpu,
            default_threads=6, pack_weights=True,
        )  # fmt: skip
        assert tuning == Tuning(
            threads=expected,
            pack_weights=True,
            lean=where == (False, True),
            is_target=is_target,
            kv_dtype=SMALL.kv_dtype if on_cpu else None,
        )


@pytest.mark.parametrize(
    ("asked", "weights", "dtype", "kept"),
    [
        ("auto", "plain", "float32", "float32"),
        ("auto", "plain", "bfloat16", "bfloat16"),
        ("auto", "int4", "bfloat16", "float16"),
        ("auto", "int8", "float32", "float16"),
        ("auto", "int8", "float64", "float64"),
        ("float32", "int4", "bfloat16", "float32"),
        ("float16", "plain", "float32", "float16"),
    ],
)
def test_keys_and_values_are_kept_by_what_the_file_is(
    asked: KVDtype, weights: KeptWeights, dtype: str, kept: str
) -> None:
    assert kv_dtype_of(asked, weights, dtype) == kept
