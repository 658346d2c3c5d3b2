"""A configuration's file is read as it was meant, or refused with the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelpool.errors import ConfigError
from specrouter.config.yaml_file import read_mapping

TEXTS = st.text("a1-:#<'\" \n", max_size=6) | st.sampled_from(["<<", "2024-11-01", "yes", "é"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.yaml"


def read(file: Path, text: str) -> dict[Any, Any]:
    file.write_text(text, encoding="utf-8")
    return read_mapping(file)


def refused(file: Path, text: str) -> str:
    with pytest.raises(ConfigError) as found:
        read(file, text)
    assert found.value.field == "config"
    assert file.name in found.value.reason
    return found.value.reason


@settings(
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.dictionaries(TEXTS, VALUES, max_size=3))
def test_what_is_written_is_read(file: Path, data: dict[str, Any]) -> None:
    assert read(file, yaml.safe_dump(data)) == data


@pytest.mark.parametrize("text", ["a: {b: 1, b: 1}", "a:\n- {b: 1, 'b': 2}", "{1: 2, 1: 3}"])
def test_a_key_that_is_there_twice_is_refused_at_any_depth(text: str, file: Path) -> None:
    assert "has the key" in refused(file, text)


def test_merges_bring_what_a_mapping_does_not_say_itself(file: Path) -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {y: 4, <<: [*b, {x: 5, z: 6}]}\n"
    found = read(file, text)
    assert found["b"] == {"x": 3, "y": 2}
    assert found["c"] == {"x": 3, "y": 4, "z": 6}


@pytest.mark.parametrize("text", ["0x_", "9" * 5000, "!!int ''", "!!bool maybe", "!!timestamp 0"])
def test_a_value_that_is_none_of_its_kind_is_refused_with_its_line(text: str, file: Path) -> None:
    assert "line 2 has no " in refused(file, f"a: 1\nb: {text}\n")


def test_a_file_that_is_nested_too_deeply_is_refused(file: Path) -> None:
    assert "too deeply" in refused(file, "a: " + "[" * 1000)
