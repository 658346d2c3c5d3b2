"""Policies are named by those that come with SpecRouter, or one's own by module and name."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelpool.errors import ConfigError
from specrouter.config import RouterConfig, SchedulerConfig
from specrouter.config.policies import (
    ADMISSION_POLICIES,
    CHAIN_POLICIES,
    NODE_SELECTIONS,
    REPLICA_POLICIES,
)
from specrouter.registry import Registry
from tests.specrouter.own_policies import FIRST

Settings = dict[str, Any]
POOL: Settings = {
    "target": "big",
    "models": [{"name": "small", "source": "a"}, {"name": "big", "source": "b"}],
}
OWN = "tests.specrouter.own_policies"
# A key that names a policy, its registry, one of one's own, and the built-in ones.
KEYS: dict[str, tuple[Registry, str, set[str]]] = {
    "scheduler.policy": (
        CHAIN_POLICIES,
        f"{OWN}:FIRST",
        {"adaptive", "static", "smallest", "target-only"},
    ),
    "trees.selection": (
        NODE_SELECTIONS,
        "tests.specrouter.own_selections:FORMED",
        {"goodput", "global-greedy", "whole"},
    ),
    "engine.admission": (
        ADMISSION_POLICIES,
        "tests.specrouter.own_admission:NOBODY",
        {"slo", "fcfs"},
    ),
    "cluster.routing.policy": (
        REPLICA_POLICIES,
        "tests.specrouter.own_replica_policy:LAST",
        {"slo", "flowguard", "join-shortest", "p2c", "round-robin"},
    ),
}


def settings(field: str, name: Any, **more: Any) -> Settings:
    section, *inner = field.split(".")
    value: Any = name
    for key in reversed(inner):
        value = {key: value}
    if section == "cluster":
        value |= {"replicas": [{"name": "a"}]}
    return {"pool": POOL, section: value | more}


def named(config: RouterConfig, field: str) -> Any:
    found: Any = config
    for key in field.split("."):
        found = getattr(found, key)
    return found


def refused(given: Settings) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        RouterConfig.load(given)
    return caught.value


@pytest.mark.parametrize("field", KEYS)
def test_all_that_come_with_specrouter_are_named_and_are_of_their_kind(field: str) -> None:
    registry, _, built_in = KEYS[field]
    assert built_in <= set(registry.names)
    assert registry.names[: len(built_in)] == tuple(registry._built_in)
    for name in sorted(built_in):
        assert registry.find(name) is registry.find(registry._built_in[name])
        more = {"chain": ["small", "big"]} if name == "static" else {}
        assert named(RouterConfig.load(settings(field, name, **more)), field) == name


@pytest.mark.parametrize("field", KEYS)
def test_ones_own_policy_is_named_by_its_module(field: str) -> None:
    registry, own, _ = KEYS[field]
    config = RouterConfig.load(settings(field, own))
    assert named(config, field) == own
    assert config.warnings == ()
    assert registry.find(own) is registry.find(own)
    assert own not in registry.names, "it has no short name"


@pytest.mark.parametrize("field", KEYS)
def test_an_unknown_name_is_answered_with_those_that_there_are(field: str) -> None:
    registry, _, _ = KEYS[field]
    error = refused(settings(field, "clever"))
    assert error.field == field
    assert error.reason.startswith("no ")
    assert "'clever'" in error.reason
    assert ", ".join(registry.names) in error.reason
    assert "package.module:NAME" in error.reason
    assert "\n" not in str(error)


@pytest.mark.parametrize("field", KEYS)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no.such.module:POLICY", "ModuleNotFoundError: No module named 'no'"),
        (f"{OWN}:NONE_SUCH", "AttributeError: "),
        ("json:dumps", "must be an instance of specrouter."),
    ],
)
def test_what_cannot_be_imported_or_is_no_policy_is_named_with_the_reason(
    field: str, name: str, reason: str
) -> None:
    error = refused(settings(field, name))
    assert error.field == field
    assert repr(name) in error.reason
    assert reason in error.reason
    assert "\n" not in str(error)


@pytest.mark.parametrize("field", KEYS)
def test_a_policy_of_another_kind_is_refused(field: str) -> None:
    for other, (_, own, _) in KEYS.items():
        if other != field:
            assert "must be an instance of" in refused(settings(field, own)).reason


@pytest.mark.parametrize("value", ["", ":", "module:", ":NAME", 3, None, ["adaptive"]])
@pytest.mark.parametrize("field", KEYS)
def test_what_is_no_name_is_refused(field: str, value: Any) -> None:
    if (field, value) == ("trees.selection", None):
        assert RouterConfig.load(settings(field, value)).trees.selection is None
    else:
        assert refused(settings(field, value)).field == field


def test_names_that_come_with_specrouter_import_no_framework() -> None:
    """It takes seconds, which an error elsewhere in the configuration should not wait for."""
    script = (
        "import sys\n"
        "from specrouter.config.policies import *\n"
        "from specrouter.config import RouterConfig\n"
        "pool = {'target': 'a', 'models': [{'name': 'a', 'source': 'b'}]}\n"
        "given = {'pool': pool, 'cluster': {'replicas': [{'name': 'a'}]}}\n"
        "for name in NODE_SELECTIONS.names:\n"
        "    RouterConfig.load({**given, 'trees': {'selection': name}})\n"
        "for name in ADMISSION_POLICIES.names:\n"
        "    RouterConfig.load({**given, 'engine': {'admission': name}})\n"
        "for name in REPLICA_POLICIES.names:\n"
        "    given['cluster']['routing'] = {'policy': name}\n"
        "    RouterConfig.load(given)\n"
        "print({'torch', 'transformers', 'ray'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_what_is_not_checked_of_the_default_policy_is_so() -> None:
    policy = CHAIN_POLICIES.find(SchedulerConfig().policy)
    assert (policy.needs_chain, policy.drafts_paths) == (False, False)


def test_a_replicas_own_admission_is_checked_too() -> None:
    def replicas(admission: str) -> Settings:
        return {"replicas": [{"name": "a"}, {"name": "b", "engine": {"admission": admission}}]}

    own = KEYS["engine.admission"][1]
    found = RouterConfig.load({"pool": POOL, "cluster": replicas(own)}).replicas()
    assert [one.engine.admission for one in found.values()] == ["slo", own]
    error = refused({"pool": POOL, "cluster": replicas("clever")})
    assert error.field == "cluster.replicas[1].engine.admission"


def test_a_module_is_found_where_python_looks_for_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from tests.specrouter.own_policies import TakesChain\nMINE = TakesChain()\n"
    (tmp_path / "policies_of_a_test.py").write_text(text)
    given = settings("scheduler.policy", "policies_of_a_test:MINE", chain=["small", "big"])
    assert "No module named" in refused(given).reason
    monkeypatch.syspath_prepend(tmp_path)
    assert RouterConfig.load(given).scheduler.chain == ("small", "big")


def test_a_policy_that_was_registered_is_named_by_its_short_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CHAIN_POLICIES, "_own", dict(CHAIN_POLICIES._own))
    given = settings("scheduler.policy", "of-a-test")
    refused(given)
    CHAIN_POLICIES.register("of-a-test", CHAIN_POLICIES.find(f"{OWN}:FIRST"))
    assert RouterConfig.load(given).scheduler.policy == "of-a-test"
    assert "of-a-test" in refused(settings("scheduler.policy", "clever")).reason


# What a chain policy takes


@pytest.mark.parametrize("policy", ["static", f"{OWN}:NEEDS_CHAIN"])
def test_a_policy_that_needs_a_chain_is_given_one(policy: str) -> None:
    error = refused({"pool": POOL, "scheduler": {"policy": policy}})
    assert error.field == "scheduler.chain"
    assert f"the policy {policy} needs a chain" in error.reason
    chained = {"policy": policy, "chain": ["small", "big"]}
    assert RouterConfig.load({"pool": POOL, "scheduler": chained}).scheduler.policy == policy


@pytest.mark.parametrize("policy", [None, "smallest", "target-only", f"{OWN}:FIRST"])
def test_other_policies_take_no_chain(policy: str | None) -> None:
    scheduler = {"chain": ["small", "big"], **({"policy": policy} if policy else {})}
    error = refused({"pool": POOL, "scheduler": scheduler})
    assert error.field == "scheduler.chain"
    assert error.reason == f"the policy {policy or 'adaptive'} takes none"


def test_a_chain_may_be_left_out_where_it_is_only_taken() -> None:
    for chain in (None, ("small", "big")):
        scheduler = {"policy": f"{OWN}:TAKES_CHAIN", "chain": chain}
        assert RouterConfig.load({"pool": POOL, "scheduler": scheduler}).scheduler.chain == chain


def test_a_policy_that_drafts_paths_takes_no_other_width() -> None:
    paths = f"{OWN}:PATHS"
    for more in ({}, {"width": 1}):
        RouterConfig.load({"pool": POOL, "scheduler": {"policy": paths, **more}})
    error = refused({"pool": POOL, "scheduler": {"policy": paths, "width": 2}})
    assert error.field == "scheduler.width"
    assert error.reason == f"the policy {paths} drafts paths: it must be 1"


def test_a_plain_policy_asks_for_nothing() -> None:
    plain = FIRST
    asks = (plain.takes_chain, plain.needs_chain, plain.drafts_paths, plain.hard_rejection)
    assert not any((*asks, plain.decides_every_cycle, plain.learns, plain.evaluates))
    assert (plain.default_depth, plain.default_selection) == (4, "whole")
