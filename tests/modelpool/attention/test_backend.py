"""Which kernels a member attends with, and why not those that were asked for."""

from dataclasses import replace

import pytest

from modelpool.attention.backend import (
    FLASHINFER,
    PATH,
    TRITON,
    AttentionBackend,
    AttentionPlace,
    Feature,
    backend_for,
    refusal_of,
)

CUDA = AttentionPlace("cuda:0", "bfloat16", frozenset({128}))
CPU = replace(CUDA, device="cpu")
WIDTHS: frozenset[Feature] = frozenset({"keys and values of two widths"})
SINKS: frozenset[Feature] = frozenset({"attention sinks"})


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelpool.attention.backend.find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("place", "backend"),
    [
        (CUDA, TRITON),
        (CPU, PATH),
        (replace(CUDA, dtype="float64"), PATH),
        (replace(CUDA, head_dims=frozenset({80})), PATH),
        (replace(CUDA, features=WIDTHS), PATH),
        (replace(CUDA, is_tried=False), PATH),
    ],
)
def test_auto_is_triton_where_it_has_kernels(
    place: AttentionPlace, backend: AttentionBackend
) -> None:
    assert refusal_of("auto", place) is None
    assert backend_for("auto", place) is backend


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_kernels_for_cuda_run_there(dtype: str, head_dim: int) -> None:
    place = replace(CUDA, dtype=dtype, head_dims=frozenset({head_dim}))
    assert TRITON.refusal(replace(place, features=SINKS)) is None
    backends = [TRITON, *[FLASHINFER][: dtype != "float32" and head_dim >= 64]]
    for backend in backends:
        assert backend.refusal(place) is None
        assert backend_for(backend.name, place) is backend


@pytest.mark.parametrize(
    ("backend", "place", "reason"),
    [
        (TRITON, CPU, "triton runs on CUDA devices, and the model is on the CPU"),
        (TRITON, replace(CUDA, dtype="float64"), "no kernels for float64"),
        (TRITON, replace(CUDA, head_dims=frozenset({80})), "heads of 80 numbers"),
        (FLASHINFER, CPU, "flashinfer runs on CUDA devices, and the model is on the CPU"),
        (FLASHINFER, replace(CUDA, dtype="float32"), "no kernels for float32, only for bfloat16"),
        (FLASHINFER, replace(CUDA, dtype="float64"), "no kernels for float64"),
        (
            FLASHINFER,
            replace(CUDA, head_dims=frozenset({32})),
            "heads of 32 numbers, only of 64, 128, 256",
        ),
        (FLASHINFER, replace(CUDA, head_dims=frozenset({96})), "heads of 96 numbers"),
        (FLASHINFER, replace(CUDA, features=SINKS), "no kernels for attention sinks"),
        (TRITON, replace(CUDA, features=WIDTHS), "no kernels for keys and values of two widths"),
    ],
)
def test_where_there_are_no_kernels_they_are_refused(
    backend: AttentionBackend, place: AttentionPlace, reason: str
) -> None:
    assert reason in (backend.refusal(place) or "")


@pytest.mark.parametrize("backend", [TRITON, FLASHINFER])
def test_what_is_not_installed_is_refused(
    backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelpool.attention.backend.find_spec", lambda name: None)
    said = backend.refusal(CUDA) or ""
    assert said.startswith(f"the package {backend.name}")
    assert "not installed" in said
    assert refusal_of(backend.name, CUDA) == said
    assert backend_for("auto", CUDA) is PATH
