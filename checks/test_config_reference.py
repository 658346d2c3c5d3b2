"""The page about the configuration says what the classes say."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from checks.config_reference import attribute_meanings, configuration_reference
from modelpool.config import ModelConfig, PoolConfig
from specrouter.config import (
    EngineConfig,
    RouterConfig,
    SchedulerConfig,
    ServerConfig,
    SloConfig,
    TreesConfig,
)
from specrouter.request.slo_fields import StageFields

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
CLASSES = [
    RouterConfig, PoolConfig, ModelConfig, SchedulerConfig, TreesConfig, EngineConfig, ServerConfig,
    SloConfig, StageFields,
]  # fmt: skip


def test_the_page_is_up_to_date() -> None:
    again = "make it again: python -m checks.config_reference > docs/configuration.md"
    assert PAGE.read_text(encoding="utf-8") == configuration_reference(), again


@pytest.mark.parametrize("scenario", sorted(PAGE.parents[1].glob("configs/*.yaml")))
def test_the_page_leads_to_every_bundled_scenario(scenario: Path) -> None:
    assert f"](../configs/{scenario.name})" in configuration_reference()


@pytest.mark.parametrize("model", CLASSES)
def test_every_key_has_a_meaning_and_every_meaning_a_key(model: type[BaseModel]) -> None:
    assert set(attribute_meanings(model)) == set(model.model_fields)
