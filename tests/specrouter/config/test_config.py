"""A configuration is read strictly, and each fault names its setting."""

import copy
from pathlib import Path
from typing import Any

import pytest

from modelpool.errors import ConfigError
from specrouter.config import RouterConfig
from specrouter.request.params import MAX_DEPTH, MAX_TREE_TOKENS, MAX_WIDTH

Settings = dict[str, Any]
POOL: Settings = {
    "target": "big",
    "models": [{"name": "small", "source": "a"}, {"name": "big", "source": "b"}],
}


def refused(settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        RouterConfig.load(settings)
    return caught.value


def test_a_pool_is_all_that_must_be_configured() -> None:
    config = RouterConfig.load({"pool": POOL})
    assert config.scheduler.policy == "adaptive"
    assert (config.scheduler.depth, config.scheduler.width) == (None, None)
    assert config.scheduler.nodes is None
    assert config.scheduler.chain is None
    assert (config.engine.max_requests, config.engine.max_model_len) == (32, None)
    assert (config.engine.prefill_chunk, config.engine.kv_budget_tokens) == (256, None)
    assert config.engine.hang_timeout_s > 0
    assert (config.trees.selection, config.trees.budget_tokens) == (None, None)
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
    assert config.slo_classes == {}
    assert RouterConfig.load(config) is config


BAD_VALUES: dict[str, list[Any]] = {
    "scheduler.policy": ["clever"],
    "scheduler.depth": [0, MAX_DEPTH + 1, "deep"],
    "scheduler.deph": [4],
    "engine.max_requests": [0, 1025],
    "engine.max_model_len": [1],
    "engine.prefill_chunk": [0],
    "engine.kv_budget_tokens": [1],
    "engine.kv_budget": [100],
    "engine.hang_timeout_s": [0, -1.5],
    "scheduler.width": [0, MAX_WIDTH + 1],
    "scheduler.nodes": [0, MAX_TREE_TOKENS + 1],
    "trees.selection": ["greedy", 3],
    "trees.budget": [64],
    "trees.budget_tokens": [0, -3, 1.5],
    "server.port": [65536, -1],
    "server.host": [3],
    "server.prot": [80],
    "pool.target": ["huge"],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in BAD_VALUES for value in BAD_VALUES[field]]
)
def test_a_bad_setting_names_itself(field: str, value: Any) -> None:
    section, key = field.split(".")
    settings = {"pool": copy.deepcopy(POOL)}
    settings.setdefault(section, {})[key] = value
    error = refused(settings)
    assert error.field == field
    assert str(error) == f"{error.field}: {error.reason}"


@pytest.mark.parametrize(
    ("given", "field"), [({}, "pool"), ({"pool": {}}, "pool.target"), ({"pool": None}, "pool")]
)
def test_what_is_missing_is_named(given: Settings, field: str) -> None:
    error = refused(given)
    assert error.field == field
    assert "required" in error.reason


def test_a_tree_has_a_largest_size() -> None:
    RouterConfig.load({"pool": POOL, "scheduler": {"depth": 16, "width": 4}})
    error = refused({"pool": POOL, "scheduler": {"depth": 13, "width": 5}})
    assert error.field == "scheduler.width"


@pytest.mark.parametrize("chain", [[], ["tiny", "big"], ["small"], ["small", "small", "big"]])
def test_a_static_chain_leads_through_the_pool_to_the_target(chain: list[str]) -> None:
    settings = {"pool": POOL, "scheduler": {"policy": "static", "chain": chain}}
    assert refused(settings).field == "scheduler.chain"


@pytest.mark.parametrize(
    "content", [b"pool: [", b"- a\n", b"", b"just text\n", b"a: b: c", b"\xff\xfe\x00"]
)
def test_a_file_that_is_no_mapping_names_itself(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_bytes(content)
    assert "broken.yaml" in refused(file).reason


def test_a_file_that_cannot_be_read_names_itself(tmp_path: Path) -> None:
    assert "absent.yaml" in refused(tmp_path / "absent.yaml").reason
    refused(tmp_path)  # a directory


@pytest.mark.parametrize(
    "origin", ["", "page.example", "https://", "https://page.example/", "https://a b", "http://a:x"]
)
def test_other_origins_are_refused(origin: str) -> None:
    error = refused({"pool": POOL, "server": {"cors_origins": ["*", origin]}})
    assert error.field == "server.cors_origins"
    assert repr(origin) in error.reason


def test_a_body_that_has_no_room_when_it_is_alone_is_told_at_the_start() -> None:
    error = refused({"pool": POOL, "server": {"max_body_bytes": 2**27}})
    assert error.field == "server.max_inflight_body_bytes"
    assert error.reason == f"must be at least server.max_body_bytes, {2**27}"


@pytest.mark.parametrize("key", ["", "two words", "line\nfeed", "\u00e9"])
def test_key_that_cannot_be_sent_is_refused_and_not_shown(key: str) -> None:
    error = refused({"pool": POOL, "server": {"api_keys": ["good", key]}})
    assert error.field == "server.api_keys"
    assert "key 2" in error.reason
    assert not key or key not in str(error)


@pytest.mark.parametrize("keys", ["40414243", [40414243], {"40414243": 1}])
def test_keys_of_a_wrong_type_are_not_shown(keys: Any) -> None:
    error = refused({"pool": POOL, "server": {"api_keys": keys}})
    assert error.field.startswith("server.api_keys")
    assert "40414243" not in str(error)


def test_keys_are_not_shown_with_the_configuration() -> None:
    config = RouterConfig.load({"pool": POOL, "server": {"api_keys": ["secret"]}})
    assert config.server.api_keys == ("secret",)
    assert "secret" not in repr(config)
