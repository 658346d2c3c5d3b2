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

POOL = {
    "target": "big",
    "models": [{"name": name, "source": f"path:/none/{name}"} for name in ("small", "big")],
}


def load(**scheduler: Any) -> RouterConfig:
    return RouterConfig.load({"pool": POOL, "scheduler": scheduler})


def test_keys_without_effect_are_read_with_a_line_each() -> None:
    config = load(inner_rounds=3, groups="requests", depth=5)
    assert config.scheduler.depth == 5
    assert len(config.warnings) == 2
    for key, line in zip(("inner_rounds", "groups"), config.warnings, strict=True):
        assert line.startswith(f"scheduler.{key} has no effect any more, remove it: ")


def test_a_key_without_effect_may_stand_in_a_section_of_a_section() -> None:
    resume = {"limit": 2, "endangered": 0}
    settings = {"pool": POOL, "cluster": {"replicas": [{"name": "a"}], "resume": resume}}
    config = RouterConfig.load(settings)
    assert config.cluster is not None
    assert config.cluster.resume.limit == 2
    [line] = config.warnings
    assert line.startswith("cluster.resume.endangered has no effect any more, remove it: ")


def test_the_tuned_policy_is_the_static_one() -> None:
    config = load(policy="ssd-tuned", chain=["small", "big"], depth=6, width=2)
    scheduler = config.scheduler
    assert (scheduler.policy, scheduler.chain) == ("static", ("small", "big"))
    assert (scheduler.depth, scheduler.width) == (6, 2)
    assert config.warnings == ("scheduler.policy: ssd-tuned is now called static",)


# A key, its old value and the new one.
RENAMED = [
    ("scheduler.policy", "ssd-tuned", "static"),
    ("scheduler.policy", "ssd-smallest", "smallest"),
    ("scheduler.policy", "paper", "research.policies:PAPER"),
    ("scheduler.policy", "specustream", "research.policies:SPECUSTREAM"),
    ("scheduler.policy", "specustream-fixed", "research.policies:SPECUSTREAM_FIXED"),
    ("trees.selection", "costmodel", "goodput"),
    ("trees.selection", "slo", "research.policies:ADASERVE"),
    ("trees.selection", "slo-phase", "research.policies:ADASERVE_SLO_PHASE"),
    ("trees.selection", "equal-greedy", "research.policies:EQUAL_GREEDY"),
    ("engine.admission", "slos-serve", "research.policies:SLOS_SERVE"),
    ("cluster.routing.policy", "flowguard-printed", "research.policies:FLOWGUARD_PRINTED"),
]
REMOVED = [
    *(f"scheduler.{key}" for key in ("inner_rounds", "groups")),
    *(f"trees.{key}" for key in ("shape", "n_max_share", "latency_margin", "root_credit")),
    *(f"trees.{key}" for key in ("order", "max_depth", "min_depth", "max_width")),
    *(f"trees.{key}" for key in ("drafter_tokens", "c1", "c2")),
    "cluster.resume.endangered",
]


def settings(field: str, value: Any) -> dict[str, Any]:
    section, *inner = field.split(".")
    for key in reversed(inner):
        value = {key: value}
    if section == "cluster":
        value["replicas"] = [{"name": "a"}]
    if field == "scheduler.policy" and value["policy"] in ("ssd-tuned", "static"):
        value["chain"] = ["small", "big"]
    return {"pool": POOL, section: value}


@pytest.mark.parametrize(("field", "old", "new"), RENAMED)
def test_an_old_value_is_read_as_the_new_one_with_a_line(field: str, old: str, new: str) -> None:
    config: Any = RouterConfig.load(settings(field, old))
    assert config.warnings == (f"{field}: {old} is now called {new}",)
    renamed = RouterConfig.load(settings(field, new))
    assert (config.model_dump(), renamed.warnings) == (renamed.model_dump(), ())
    for key in field.split("."):
        config = getattr(config, key)
    assert config == new


def test_every_value_and_key_that_is_known_as_an_old_one_is_tried() -> None:
    known = [
        (".".join(path), *pair) for path, names in _RENAMED_VALUES.items() for pair in names.items()
    ]
    assert known == RENAMED
    assert [".".join(path) for path in _WITHOUT_EFFECT] == REMOVED


@pytest.mark.parametrize("field", REMOVED[:-1])  # the last one is nested
@pytest.mark.parametrize("value", ["adaserve", 3, None])
def test_a_removed_key_is_read_whatever_its_value_with_a_line(field: str, value: Any) -> None:
    config = RouterConfig.load(settings(field, value))
    [line] = config.warnings
    assert line.startswith(f"{field} has no effect any more, remove it: ")
    assert config.model_dump() == RouterConfig.load({"pool": POOL}).model_dump()
    if field.startswith("trees."):
        assert "research.policies.adaserve:AdaServe" in line


def test_adaserves_trees_of_an_earlier_version_are_its_selection() -> None:
    old = {"selection": "slo", "shape": "adaserve", "budget_tokens": 512, "max_depth": 8}
    config = RouterConfig.load({"pool": POOL, "trees": old})
    assert config.trees == TreesConfig(selection="research.policies:ADASERVE", budget_tokens=512)
    assert len(config.warnings) == 3


@pytest.mark.parametrize("field", [field for field, *_ in RENAMED])
@pytest.mark.parametrize("value", [None, 3, ["paper"], {"paper": 1}])
def test_a_value_of_a_wrong_type_is_for_validation_to_refuse(field: str, value: Any) -> None:
    given = settings(field, value)
    assert in_new_spelling(given) == (given, ())


def test_settings_of_this_version_have_no_warnings() -> None:
    settings = {"pool": POOL, "scheduler": {"policy": "static", "chain": ["small", "big"]}}
    assert in_new_spelling(settings) == (settings, ())
    assert RouterConfig.load(settings).warnings == ()


def test_the_caller_s_settings_are_left_as_they_are() -> None:
    settings = {"scheduler": {"inner_rounds": 2}}
    assert in_new_spelling(settings)[0] == {"scheduler": {}}
    assert settings == {"scheduler": {"inner_rounds": 2}}


@pytest.mark.parametrize("scheduler", [3, "adaptive", ["inner_rounds"], None])
def test_a_section_of_a_wrong_type_is_for_validation_to_refuse(scheduler: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        RouterConfig.load({"pool": POOL, "scheduler": scheduler})
    assert refusal.value.field == "scheduler"


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
