"""Every kernel compiles for Ampere and Hopper, keeps its numbers in registers, and fits in them."""

import pytest

from test_support.triton_interpreter import needs_triton
from tests.compile_only import TARGETS, compiled_elsewhere

SHARED_BYTES = 99 * 1024  # of a block on the smallest chips of Ampere


@needs_triton
@pytest.mark.long
def test_kernels_compile_without_spilling() -> None:
    found = compiled_elsewhere()
    assert {one.target for one in found} == set(TARGETS.values())
    assert [one for one in found if one.spilled_bytes] == []
    assert [one for one in found if one.shared_bytes > SHARED_BYTES] == []
