"""Keys of earlier versions are read, with one line each that says what replaces them."""

from __future__ import annotations

from typing import Any

import pytest

from specrouter.cli.arguments import default_config
from specrouter.cli.check import check_config
from specrouter.config import RouterConfig
from specrouter.config.old_spellings import _RENAMED_VALUES, _WITHOUT_EFFECT, in_new_spelling
from specrouter.config.yaml_file import read_mapping
from tests.specrouter.config import test_policy_names
from tests.specrouter.config.test_config import POOL, Settings
from tests.specrouter.config.test_policy_names import named


def load(**scheduler: Any) -> RouterConfig:
    return RouterConfig.load({"pool": POOL, "scheduler": scheduler})


# A key, its old value and the new one.
RENAMED = [
    (".".join(path), *pair) for path, names in _RENAMED_VALUES.items() for pair in names.items()
]
REMOVED = [".".join(path) for path in _WITHOUT_EFFECT]


def settings(field: str, value: Any) -> Settings:
    needs_chain = field == "scheduler.policy" and value in ("ssd-tuned", "static")
    more: dict[str, Any] = {"chain": ["small", "big"]} if needs_chain else {}
    more |= POOL if field.startswith("pool.") else {}
    return test_policy_names.settings(field, value, **more)


@pytest.mark.parametrize(("field", "old", "new"), RENAMED)
def test_an_old_value_is_read_as_the_new_one_with_a_line(field: str, old: str, new: str) -> None:
    config = RouterConfig.load(settings(field, old))
    assert config.warnings == (f"{field}: {old} is now called {new}",)
    renamed = RouterConfig.load(settings(field, new))
    assert (config.model_dump(), renamed.warnings) == (renamed.model_dump(), ())
    assert named(config, field) == new


@pytest.mark.parametrize("field", REMOVED)
@pytest.mark.parametrize("value", ["adaserve", 3, None])
def test_a_removed_key_is_read_whatever_its_value_with_a_line(field: str, value: Any) -> None:
    given = settings(field, value)
    config = RouterConfig.load(given)
    [line] = config.warnings
    assert line.startswith(f"{field} has no effect any more, remove it: ")
    place = given
    *sections, key = field.split(".")
    for section in sections:
        place = place[section]
    del place[key]
    assert config.model_dump() == RouterConfig.load(given).model_dump()
    if field.startswith("trees."):
        assert "research.policies.adaserve:AdaServe" in line


def test_the_caller_s_settings_are_left_as_they_are() -> None:
    settings = {"scheduler": {"inner_rounds": 2}}
    assert in_new_spelling(settings)[0] == {"scheduler": {}}
    assert settings == {"scheduler": {"inner_rounds": 2}}


def test_check_reports_old_spellings() -> None:
    settings = read_mapping(default_config())
    settings["scheduler"] = {**settings.get("scheduler", {}), "groups": "one"}
    [line] = [w for w in check_config(RouterConfig.load(settings)).warnings if "groups" in w]
    assert line.startswith("scheduler.groups has no effect any more")
