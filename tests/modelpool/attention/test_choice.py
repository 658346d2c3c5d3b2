"""Which kernels a member attends with, and why not those that were asked for."""

from dataclasses import replace

import pytest

from modelpool.attention.choice import AttentionName, AttentionPlace, backend_for, refusal

CUDA = AttentionPlace("cuda:0", "bfloat16", frozenset({128}))
CPU = replace(CUDA, device="cpu")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelpool.attention.choice.find_spec", lambda name: object())


@pytest.mark.parametrize("asked", ["auto", "sdpa", "path"])
@pytest.mark.parametrize(
    "place", [CUDA, CPU, replace(CUDA, dtype="float64", head_dims=frozenset({80}))]
)
def test_what_is_plain_pytorch_runs_everywhere(asked: AttentionName, place: AttentionPlace) -> None:
    assert refusal(asked, place) is None
    assert backend_for(asked, place) == ("sdpa" if asked == "auto" else asked)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_kernels_for_cuda_run_there(dtype: str, head_dim: int) -> None:
    place = replace(CUDA, dtype=dtype, head_dims=frozenset({head_dim}))
    asked: list[AttentionName] = ["triton"]
    if dtype != "float32" and head_dim >= 64:
        asked.append("flashinfer")
    for name in asked:
        assert refusal(name, place) is None
        assert backend_for(name, place) == name


@pytest.mark.parametrize(
    ("asked", "place", "reason"),
    [
        ("triton", CPU, "triton runs on CUDA devices, and the model is on the CPU"),
        ("triton", replace(CUDA, dtype="float64"), "no kernels for float64"),
        ("triton", replace(CUDA, head_dims=frozenset({80})), "heads of 80 numbers"),
        ("flashinfer", CPU, "flashinfer runs on CUDA devices, and the model is on the CPU"),
        ("flashinfer", replace(CUDA, dtype="float32"), "no kernels for float32, only for bfloat16"),
        ("flashinfer", replace(CUDA, dtype="float64"), "no kernels for float64"),
        (
            "flashinfer",
            replace(CUDA, head_dims=frozenset({32})),
            "heads of 32 numbers, only of 64, 128, 256",
        ),
        ("flashinfer", replace(CUDA, head_dims=frozenset({96})), "heads of 96 numbers"),
    ],
)
def test_where_there_are_no_kernels_they_are_refused(
    asked: AttentionName, place: AttentionPlace, reason: str
) -> None:
    assert reason in (refusal(asked, place) or "")


@pytest.mark.parametrize("asked", ["triton", "flashinfer"])
def test_what_is_not_installed_is_refused(
    asked: AttentionName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelpool.attention.choice.find_spec", lambda name: None)
    said = refusal(asked, CUDA) or ""
    assert said.startswith(f"the package {asked}")
    assert "not installed" in said


@pytest.mark.parametrize("asked", ["triton", "flashinfer"])
def test_a_member_that_had_to_go_to_the_cpu_has_sdpa(asked: AttentionName) -> None:
    assert backend_for(asked, CPU) == "sdpa"
