"""How much memory keys and values may take: shares and amounts, and what is neither."""

from typing import Any

import pytest

from modelpool.errors import ConfigError
from modelpool.kv_memory import KVMemory


def memory(value: float | str) -> KVMemory:
    return KVMemory.of(value, 128, "engine.kv_memory")


@pytest.mark.parametrize(
    ("value", "blocks"), [(0.5, 500), ("50%", 500), ("12.5 %", 125), (1, 1000)]
)
def test_shares_are_of_all_memory_of_the_device(value: float | str, blocks: int) -> None:
    assert memory(value).tokens(4, 4 * 128 * 1000) == 128 * blocks


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("8GiB", 8 * 2**30), ("1.5 MB", 1_500_000), ("2TiB", 2 * 2**40), ("640KiB", 640 * 1024)],
)
def test_amounts_have_units(value: str, wanted: int) -> None:
    assert memory(value).bytes == wanted


def test_whole_blocks_are_taken() -> None:
    assert memory("1MiB").tokens(1000, 0) == 1024
    assert memory("1MiB").tokens(1100, 0) == 896


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.5, 8, True, "", "8", "lots", "0B", "0%", "110%"])
def test_what_is_neither_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        memory(value)


def test_less_than_a_block_is_refused_with_what_one_takes() -> None:
    with pytest.raises(ConfigError, match=r"^engine.kv_memory: 128 tokens alone take 125 KiB"):
        memory("100KiB").tokens(1000, 0)
