"""4 bits hold a weight as well as they can."""

from hypothesis import given
from hypothesis import strategies as st

from modelpool.checkpoint.block_values import GROUP
from modelpool.checkpoint.int4_values import in_4_bits
from test_support.llama_models import draw


@given(
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 130),
    spread=st.floats(1e-6, 1e6),
    shift=st.floats(-3.0, 3.0),
)
def test_numbers_and_scales_are_in_their_ranges(
    outputs: int, inputs: int, spread: float, shift: float
) -> None:
    values = in_4_bits((draw(outputs, inputs) + shift) * spread)
    assert values.scales is not None
    assert int(values.numbers.max()) <= 15
    assert 1 <= int(values.scales.min()) <= int(values.scales.max()) <= 17


def test_no_other_scale_of_a_group_is_nearer() -> None:
    weight = draw(1, GROUP)
    values = in_4_bits(weight)
    assert values.units is not None
    plain = weight / values.units
    error = float((values.plain() / values.units - plain).square().sum())
    for scale in range(1, 18):
        for centre in range(256):
            nibbles = ((plain + centre) / scale).round().clamp(0, 15)
            levels = nibbles * scale - centre
            if levels.min() >= -128 and levels.max() <= 127:
                centred = round(7.5 * scale - float(plain.max() + plain.min()) / 2)
                if centre == min(max(centred, 0), 255):
                    assert error <= float((levels - plain).square().sum()) + 1e-3
