"""Kernels for x86-64 whose instructions this CPU may not have compute the same, in plain C."""

import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modelpool.checkpoint.int8_values import Int8Values
from modelpool.fast.panels import BlockWeight, Int8PanelWeight, PanelWeight, is_exact
from modelpool.kernels import compiler
from modelpool.kernels.library import KERNELS, LinearKernels, linear_kernels, opened
from test_support.llama_models import draw
from tests.modelpool.fast.test_panels import FORMS, some_blocks

_EMULATION = Path(__file__).parent / "emulation"
_NAMES = [name for name in KERNELS if name != "neon"]

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("cc") is None or linear_kernels() is None,
    reason="no compiler for x86-64, or no AVX2",
)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> LinearKernels:
    """Without attention, whose kernels are compared with plain C. Not optimised: to compile plain C
    for each instruction would take a minute."""
    file = tmp_path_factory.mktemp("emulated") / "linear.so"
    linear = [name for name in compiler.SOURCES if name not in compiler.ATTENTION]
    sources = [str(compiler.FOLDER / name) for name in linear]
    plain = ("-O0", "-Dtarget(x)=", "-DEMULATED", f"-I{_EMULATION}", "-w")
    attention = ("-x", "c", "-")
    subprocess.run(
        ["cc", *compiler.FLAGS, *plain, "-shared", "-o", str(file), *sources, *attention],
        input=b"int sr_attend(void) { return 1; }",
        check=True,
    )
    return LinearKernels(opened(file), _NAMES[0], tuple(_NAMES))


@pytest.mark.parametrize("name", _NAMES)
def test_every_kernel_computes_what_whole_numbers_say(name: str, emulated: LinearKernels) -> None:
    assert is_exact(replace(emulated, name=name))


@pytest.mark.parametrize("inputs", [32, 736, 1120])
@pytest.mark.parametrize("rows", [1, 3, 8, 17, 70])
def test_they_agree_with_this_cpu_s_on_any_shape(
    inputs: int, rows: int, emulated: LinearKernels
) -> None:
    own = linear_kernels()
    assert own is not None
    x, bias = draw(rows, inputs), draw(41)
    blocks = [some_blocks(form, 41, inputs) for form in FORMS]
    whole = Int8Values.of(draw(41, inputs))

    def weights(kernels: LinearKernels) -> list[PanelWeight]:
        in_blocks = [BlockWeight(one, bias, kernels) for one in blocks]
        return [Int8PanelWeight(whole, bias, kernels), *in_blocks]

    for mine, other in zip(weights(own), weights(emulated), strict=True):
        wanted = mine.multiply(x, kernel="plain")
        for name in _NAMES:
            assert torch.equal(other.multiply(x, kernel=name), wanted), name
