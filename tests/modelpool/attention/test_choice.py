"""Which kernels a member attends with, and why not those that were asked for."""

from dataclasses import replace

import pytest

from modelpool.attention.choice import AttentionName, AttentionPlace, backend_for, refusal

CUDA = AttentionPlace("cuda:0", "bfloat16", 128)
CPU = replace(CUDA, device="cpu")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelpool.attention.choice.find_spec", lambda name: object())


@pytest.mark.parametrize("asked", ["auto", "sdpa"])
@pytest.mark.parametrize("place", [CUDA, CPU, replace(CUDA, dtype="float64", head_dim=80)])
def test_sdpa_runs_everywhere(asked: AttentionName, place: AttentionPlace) -> None:
    assert refusal(asked, place) is None
    assert backend_for(asked, place) == "sdpa"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_triton_runs_on_cuda(dtype: str, head_dim: int) -> None:
    place = replace(CUDA, dtype=dtype, head_dim=head_dim)
    assert refusal("triton", place) is None
    assert backend_for("triton", place) == "triton"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (CPU, "the model is on the CPU"),
        (replace(CUDA, dtype="float64"), "no kernels for float64"),
        (replace(CUDA, head_dim=80), "heads of 80 numbers"),
    ],
)
def test_where_triton_has_no_kernels_it_is_refused(place: AttentionPlace, reason: str) -> None:
    assert reason in (refusal("triton", place) or "")


def test_triton_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelpool.attention.choice.find_spec", lambda name: None)
    assert "not installed" in (refusal("triton", CUDA) or "")


def test_a_member_that_had_to_go_to_the_cpu_has_sdpa() -> None:
    assert backend_for("triton", CPU) == "sdpa"
