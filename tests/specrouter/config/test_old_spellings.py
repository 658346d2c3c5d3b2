"""Keys of earlier versions are read, with one line each that says what replaces them."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.errors import ConfigError
from specrouter.cli.arguments import default_config
from specrouter.cli.check import check_config
from specrouter.config import RouterConfig
from specrouter.config.old_spellings import in_new_spelling
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
