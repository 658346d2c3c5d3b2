"""Families of published models: what may be relied on without having seen one of them."""

from pathlib import Path

import pytest
import yaml

from modelpool.families import FAMILIES, family_of


def test_names_and_ids_are_each_of_one_family() -> None:
    names = [family.name for family in FAMILIES]
    ids = [hub_id for family in FAMILIES for hub_id in family.hub_ids]
    assert len(set(names)) == len(names)
    assert len(set(ids)) == len(ids)
    assert all(len(family.hub_ids) > 1 for family in FAMILIES)


def test_smaller_siblings_are_found_from_an_id() -> None:
    family = family_of("Qwen/Qwen2.5-3B-Instruct")
    assert family is not None
    smaller = ["Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"]
    assert list(family.smaller_than("Qwen/Qwen2.5-3B-Instruct")) == smaller
    assert not family.smaller_than(smaller[-1])
    assert family_of("somebody/something") is None


@pytest.mark.parametrize("file", ["qwen2.5", "qwen3", "llama3", "llama2-paper"])
def test_the_models_of_a_scenario_are_siblings_from_the_smallest_on(file: str) -> None:
    text = (Path(__file__).parents[2] / "configs" / f"{file}.yaml").read_text(encoding="utf-8")
    members = yaml.safe_load(text)["pool"]["models"]
    ids = [one["source"].removeprefix("hub:") for one in members if "hub:" in one["source"]]
    family = family_of(ids[-1])
    assert family is not None
    assert ids == [one for one in reversed(family.hub_ids) if one in ids]
