"""Policies are named by those that come with SpecRouter, or one's own by module and name."""

from typing import Any

import pytest

from specrouter.config import RouterConfig
from specrouter.config.policies import (
    ADMISSION_POLICIES,
    CHAIN_POLICIES,
    NODE_SELECTIONS,
    REPLICA_POLICIES,
)
from specrouter.registry import Registry
from tests.specrouter.config.test_config import POOL, Settings, refused

OWN = "tests.specrouter.own_policies"
# A key that names a policy, its registry, and one of one's own.
KEYS: dict[str, tuple[Registry, str]] = {
    "scheduler.policy": (CHAIN_POLICIES, f"{OWN}:FIRST"),
    "trees.selection": (NODE_SELECTIONS, "tests.specrouter.own_selections:FORMED"),
    "engine.admission": (ADMISSION_POLICIES, "tests.specrouter.own_admission:NOBODY"),
    "cluster.routing.policy": (REPLICA_POLICIES, "tests.specrouter.own_replica_policy:LAST"),
}


def settings(field: str, name: Any, **more: Any) -> Settings:
    section, *inner = field.split(".")
    value: Any = name
    for key in reversed(inner):
        value = {key: value}
    if section == "cluster":
        value |= {"replicas": [{"name": "a"}]}
    return {"pool": POOL, section: value | more if inner else value}


def named(config: RouterConfig, field: str) -> Any:
    found: Any = config
    for key in field.split("."):
        found = getattr(found, key)
    return found


@pytest.mark.parametrize("field", KEYS)
def test_all_that_come_with_specrouter_are_named_and_are_of_their_kind(field: str) -> None:
    registry, _ = KEYS[field]
    for name, address in registry._built_in.items():
        assert registry.find(name) is registry.find(address)
        more = {"chain": ["small", "big"]} if name == "static" else {}
        assert named(RouterConfig.load(settings(field, name, **more)), field) == name


@pytest.mark.parametrize("field", KEYS)
def test_ones_own_policy_is_named_by_its_module(field: str) -> None:
    _, own = KEYS[field]
    config = RouterConfig.load(settings(field, own))
    assert named(config, field) == own
    assert config.warnings == ()


@pytest.mark.parametrize("field", KEYS)
def test_what_is_unknown_of_another_kind_or_no_name_is_refused(field: str) -> None:
    others = [own for other, (_, own) in KEYS.items() if other != field]
    for name in ("clever", "no.such.module:POLICY", "json:dumps", *others):
        error = refused(settings(field, name))
        assert error.field == field
        assert repr(name) in error.reason
    for value in ("", 3, ["adaptive"]):
        assert refused(settings(field, value)).field == field


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
