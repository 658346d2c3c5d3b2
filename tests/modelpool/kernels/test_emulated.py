"""Kernels for x86-64 whose instructions this CPU may not have compute the same, in plain C."""

import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modelpool.checkpoint.int4_values import Int4Values
from modelpool.fast.int4 import BlockWeight, Int4Weight, Int8PanelWeight, PanelWeight, is_exact
from modelpool.kernels import library
from modelpool.kernels.library import KERNELS, LinearKernels, linear_kernels, opened
from test_support.llama_models import draw
from tests.modelpool.fast.test_int4 import some_blocks

_EMULATION = Path(__file__).parent / "emulation"
_NAMES = [name for name in KERNELS if name != "neon"]

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("cc") is None or linear_kernels() is None,
    reason="no compiler for x86-64, or no AVX2",
)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> LinearKernels:
    """But for attention, whose kernels are compared with plain C."""
    folder = tmp_path_factory.mktemp("emulated")
    linear = [name for name in library._SOURCES if name not in library._ATTENTION]
    plain = ("-Dtarget(x)=", "-DIN_ORDER(x)=", f"-I{_EMULATION}", "-w", "-O1")
    for names, flags in ((linear, plain), (library._ATTENTION, ("-O1",))):
        sources = [str(library._FOLDER / name) for name in names]
        subprocess.run(["cc", *library._FLAGS, *flags, "-c", *sources], cwd=folder, check=True)
    objects = [str(one) for one in folder.glob("*.o")]
    file = folder / "linear.so"
    subprocess.run(["cc", "-shared", "-o", str(file), *objects], check=True)
    return LinearKernels(opened(file), _NAMES[0], tuple(_NAMES))


@pytest.mark.parametrize("name", _NAMES)
def test_every_kernel_computes_what_whole_numbers_say(name: str, emulated: LinearKernels) -> None:
    assert is_exact(replace(emulated, name=name))


@pytest.mark.parametrize("inputs", [32, 736, 1120])
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 32, 50, 70])
def test_they_agree_with_this_cpu_s_on_any_shape(
    inputs: int, rows: int, emulated: LinearKernels
) -> None:
    own = linear_kernels()
    assert own is not None
    values, x, bias = Int4Values.of(draw(41, inputs)), draw(rows, inputs), draw(41)
    blocks = some_blocks(41, inputs // 32, 1, scaled=True)

    def weights(kernels: LinearKernels) -> list[PanelWeight]:
        return [
            Int4Weight([values], bias, kernels),
            Int8PanelWeight([values.expanded()], bias, kernels),
            BlockWeight([blocks], bias, kernels),
        ]

    for mine, other in zip(weights(own), weights(emulated), strict=True):
        wanted = mine.multiply(x)
        for name in _NAMES:
            assert torch.equal(other.multiply(x, kernel=name), wanted), name
