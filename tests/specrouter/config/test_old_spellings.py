"""Keys of earlier versions are read, with one line each that says what replaces them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from modelpool.errors import ConfigError
from specrouter.cli.arguments import default_config
from specrouter.cli.check import check_config
from specrouter.config import RouterConfig, TreesConfig
from specrouter.config.old_spellings import _RENAMED_VALUES, _WITHOUT_EFFECT, in_new_spelling
from specrouter.config.policies import CHAIN_POLICIES
from specrouter.config.yaml_file import read_mapping
from specrouter.router import ChainRouter
from tests.specrouter.config import test_policy_names
from tests.specrouter.config.test_config import POOL, Settings, refused
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


def test_adaserves_trees_of_an_earlier_version_are_its_selection() -> None:
    old = {"selection": "slo", "shape": "adaserve", "budget_tokens": 512, "max_depth": 8}
    config = RouterConfig.load({"pool": POOL, "trees": old})
    assert config.trees == TreesConfig(selection="research.policies:ADASERVE", budget_tokens=512)
    assert len(config.warnings) == 3


def test_a_value_of_a_wrong_type_is_for_validation_to_refuse() -> None:
    for field, *_ in RENAMED:
        for value in (None, 3, ["paper"], {"paper": 1}):
            given = settings(field, value)
            assert in_new_spelling(given) == (given, ())


def test_the_caller_s_settings_are_left_as_they_are() -> None:
    settings = {"scheduler": {"inner_rounds": 2}}
    assert in_new_spelling(settings)[0] == {"scheduler": {}}
    assert settings == {"scheduler": {"inner_rounds": 2}}


def test_a_section_of_a_wrong_type_is_for_validation_to_refuse() -> None:
    for scheduler in (3, "adaptive", ["inner_rounds"], None):
        assert refused({"pool": POOL, "scheduler": scheduler}).field == "scheduler"


def test_a_copy_and_a_second_reading_keep_the_warnings() -> None:
    config = load(inner_rounds=3)
    copy = config.model_copy(update={"engine": config.engine})
    assert copy.warnings == RouterConfig.load(config).warnings == config.warnings != ()


def test_check_reports_old_spellings() -> None:
    settings = read_mapping(default_config())
    settings["scheduler"] = {**settings.get("scheduler", {}), "groups": "one"}
    [line] = [w for w in check_config(RouterConfig.load(settings)).warnings if "groups" in w]
    assert line.startswith("scheduler.groups has no effect any more")


def test_a_router_logs_each_old_spelling_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opens(*_: object, **__: object) -> None:
        raise ConfigError("pool", "is not opened here")

    monkeypatch.setattr("specrouter.router.ModelPool.from_config", opens)
    config = load(inner_rounds=3)
    with pytest.raises(ConfigError, match="is not opened here"):
        ChainRouter(config)
    assert [record.message for record in caplog.records] == list(config.warnings)


def test_an_error_tells_what_an_old_spelling_was_read_as(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a checkout there is no laboratory."""
    monkeypatch.setitem(sys.modules, "research.policies", None)
    monkeypatch.setattr(CHAIN_POLICIES, "_imported", {})
    with pytest.raises(ConfigError) as refusal:
        load(policy="paper")
    assert refusal.value.field == "scheduler.policy"
    assert refusal.value.reason.endswith(
        "; scheduler.policy: paper is now called research.policies:PAPER"
    )
