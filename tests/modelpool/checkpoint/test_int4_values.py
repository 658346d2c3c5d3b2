"""4 bits are int8's levels in a compressed form, and hold a weight as well as these can."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from modelpool.checkpoint.int4_values import GROUP, Int4Values
from test_support.llama_models import draw


@given(
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 130),
    spread=st.floats(1e-6, 1e6),
    shift=st.floats(-3.0, 3.0),
)
def test_every_level_fits_int8_and_is_its_nibble(
    outputs: int, inputs: int, spread: float, shift: float
) -> None:
    weight = (draw(outputs, inputs) + shift) * spread
    values = Int4Values.of(weight)
    assert int(values.nibbles.max()) <= 15
    assert 1 <= int(values.scales.min()) <= int(values.scales.max()) <= 17
    levels = values.expanded().levels.int()
    group = torch.arange(inputs) // GROUP
    wanted = values.nibbles.int() * values.scales.int()[:, group] - values.centres.int()[:, group]
    assert torch.equal(levels, wanted)


def test_no_other_scale_of_a_group_is_nearer() -> None:
    weight = draw(1, GROUP)
    values = Int4Values.of(weight)
    plain = weight / values.units
    error = float((values.expanded().levels - plain).square().sum())
    for scale in range(1, 18):
        for centre in range(256):
            nibbles = ((plain + centre) / scale).round().clamp(0, 15)
            levels = nibbles * scale - centre
            if levels.min() >= -128 and levels.max() <= 127:
                centred = round(7.5 * scale - float(plain.max() + plain.min()) / 2)
                if centre == min(max(centred, 0), 255):
                    assert error <= float((levels - plain).square().sum()) + 1e-3
