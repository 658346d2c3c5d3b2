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
from specrouter.config.slo_class import StageConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
CLASSES = [
    RouterConfig, PoolConfig, ModelConfig, SchedulerConfig, TreesConfig, EngineConfig, ServerConfig,
    SloConfig, StageConfig,
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


@pytest.mark.parametrize(
    "row",
    [
        "| `target` | text | required | the name of the model whose output is served. |",
        "| `depth` | whole number, 1 to 20 | none | levels of ",
        "| `policy` | `adaptive`, `static`, `smallest`, `target-only` or `package.module:NAME` | ",
        "| `request_timeout_s` | number, above 0 | `600.0` | ",
        "| `api_keys` | list of text | none | ",
        "| `pack_weights` | `true` or `false` | `true` | ",
        "| `chat_template` | path | none | ",
        "| `models` | [pool.models[]](#poolmodels) | required | ",
        "| `slo_classes` | [slo_classes.NAME](#slo_classesname) | none | ",
    ],
)
def test_a_row_has_type_range_default_and_meaning(row: str) -> None:
    assert row in configuration_reference()


def test_names_may_share_a_meaning_which_may_go_on_over_lines() -> None:
    class Shape(BaseModel):
        """A shape.

        Attributes:
            depth, width: of a tree,
                in tokens.
            name: free.
        """

    assert attribute_meanings(Shape) == {
        "depth": "of a tree, in tokens.",
        "width": "of a tree, in tokens.",
        "name": "free.",
    }
