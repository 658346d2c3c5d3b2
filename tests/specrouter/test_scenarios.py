"""Bundled scenarios are found by name, wherever the program runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool.errors import ConfigError
from specrouter import RouterConfig
from specrouter.scenarios import find_scenario, scenario_folder, scenario_names


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_can_be_loaded_by_name_outside_the_clone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = RouterConfig.load(name)
    assert found == RouterConfig.load(scenario_folder() / f"{name}.yaml")
    assert found.engine.max_model_len is not None, "its memory does not depend on the machine"


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_scenario("tiny") == scenario_folder() / "tiny.yaml"
    (tmp_path / "tiny").write_text("pool: {}\n")
    assert find_scenario("tiny") == Path("tiny")


def test_another_name_is_an_error_that_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"cannot read qwen9: .*bench-cpu, .*tiny-ngram"):
        RouterConfig.load("qwen9")
    assert find_scenario("../configs/tiny") == Path("../configs/tiny")
