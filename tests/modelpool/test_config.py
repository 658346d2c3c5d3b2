"""Every fault of a pool's configuration names its field."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from modelpool.config import PoolConfig, validate_config
from modelpool.config_faults import config_error
from modelpool.errors import ConfigError

SMALL = {"name": "small", "source": "bundled:small"}
LARGE = {"name": "large", "source": "path:large", "dtype": "bfloat16"}
NGRAM = {"name": "quoter", "source": "ngram"}


def field_of(pool: Any, field: str = "pool") -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        validate_config(PoolConfig, pool, field)
    assert str(caught.value) == f"{caught.value.field}: {caught.value.reason}"
    return caught.value.field, caught.value.reason


def test_defaults_are_filled_in_and_the_result_is_frozen() -> None:
    pool = validate_config(PoolConfig, {"target": "large", "models": [SMALL, LARGE]}, "pool")
    small = pool.models[0]
    assert (small.dtype, small.device, small.pinned) == ("auto", "auto", False)
    assert (small.revision, small.trust_remote_code) == (None, False)
    with pytest.raises(ValidationError):
        pool.target = "small"
    assert validate_config(PoolConfig, pool, "pool") is pool


@pytest.mark.parametrize(
    ("models", "field", "word"),
    [
        ([SMALL, {**LARGE, "dtype": "int3"}], "models[1].dtype", "int3"),
        (
            [SMALL, {**LARGE, "device": "gpu"}],
            "models[1].device",
            "must be auto, cpu, cuda or cuda:N (got 'gpu')",
        ),
        ([SMALL, {**LARGE, "dtyp": "auto"}], "models[1].dtyp", "'dtype'"),
        ([{"name": "small"}], "models[0].source", "required"),
        ([SMALL, SMALL], "models[1].name", "models[0]"),
        ([SMALL], "target", "'large'"),
        ([{**SMALL, "name": "a>b"}], "models[0].name", "a>b"),
        (
            [{**SMALL, "name": "tiny 1m"}],
            "models[0].name",
            "must have no spaces, '>' or ',' (got 'tiny 1m')",
        ),
        ([{**SMALL, "name": ""}], "models[0].name", "at least 1 character"),
        ([NGRAM, LARGE, {**NGRAM, "name": "b"}], "models[2].source", "models[0]"),
        ([LARGE, {**NGRAM, "dtype": "float32"}], "models[1].dtype", "float32"),
        ([LARGE, {**NGRAM, "device": "cpu"}], "models[1].device", "cpu"),
        ([LARGE, {**NGRAM, "threads": 2}], "models[1].threads", "2"),
        ([SMALL, {**LARGE, "threads": 0}], "models[1].threads", "1"),
        (
            [SMALL, {**LARGE, "tensor_parallel": 2}],
            "models[1].tensor_parallel",
            "must be 1 (got 2): transformers' tp_plan",
        ),
        ([{**LARGE, "tensor_parallel": 0}], "models[0].tensor_parallel", "1 (got 0)"),
        ([{**LARGE, "tensor_parallel": "all"}], "models[0].tensor_parallel", "'all'"),
        ([LARGE, {**NGRAM, "tensor_parallel": 2}], "models[1].tensor_parallel", "must be 1"),
        ([LARGE, {**NGRAM, "inflate_to": 2_000_000}], "models[1].inflate_to", "no weights"),
        ([SMALL, {**LARGE, "inflate_to": 9}], "models[1].inflate_to", "1000000"),
        ([LARGE, {**NGRAM, "weights": "int8"}], "models[1].weights", "int8"),
        ([LARGE, {**NGRAM, "revision": "v1"}], "models[1].revision", "v1"),
        (
            [LARGE, {**NGRAM, "trust_remote_code": True}],
            "models[1].trust_remote_code",
            "no weights",
        ),
        ([], "models", "1"),
        ("small", "models", "must be a list, such as [a, b] (got 'small')"),
        (SMALL, "models", "must be a list"),
        (None, "models", "is empty; this setting is required"),
        (["small"], "models[0]", "must be a mapping of settings (got 'small')"),
        ([{**SMALL, "dtype": None}], "models[0].dtype", "is empty; fill it in"),
    ],
)
def test_a_fault_names_its_field(models: object, field: str, word: str) -> None:
    found, reason = field_of({"target": "large", "models": models})
    assert found == f"pool.{field}"
    assert word in reason


def test_what_only_drafts_is_no_target() -> None:
    found, reason = field_of({"target": "quoter", "models": [NGRAM, LARGE]})
    assert found == "pool.target"
    assert "cannot verify" in reason


def test_an_unknown_key_is_told_before_what_is_missing_because_of_it() -> None:
    found, reason = field_of({"taget": "small", "models": [SMALL]})
    assert found == "pool.taget"
    assert "did you mean 'target'" in reason


def test_a_pool_that_is_no_mapping_is_refused() -> None:
    assert field_of(["small"])[0] == "pool"
    assert field_of(None)[0] == "pool"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_a_device_is_asked_for_by_kind_or_by_number(device: str) -> None:
    raw = {"target": "small", "models": [{**SMALL, "device": device}]}
    assert validate_config(PoolConfig, raw).models[0].device == device


def test_the_limit_has_room_for_what_is_never_evicted() -> None:
    models = [{**SMALL, "pinned": True}, LARGE]
    found, _ = field_of({"target": "large", "models": models, "max_loaded_models": 1})
    assert found == "pool.max_loaded_models"


def test_a_member_without_weights_counts_for_no_limit() -> None:
    models = [{**NGRAM, "pinned": True}, LARGE]
    raw = {"target": "large", "models": models, "max_loaded_models": 1}
    pool = validate_config(PoolConfig, raw, "pool")
    assert [model.has_model for model in pool.models] == [False, True]


def test_paths_start_at_the_root_of_a_larger_configuration() -> None:
    class Whole(BaseModel):
        model_config = ConfigDict(extra="forbid")
        pool: PoolConfig

    with pytest.raises(ValidationError) as caught:
        Whole.model_validate({"pool": {"target": "x", "models": [SMALL]}})
    assert config_error(caught.value).field == "pool.target"
    with pytest.raises(ConfigError) as raised:
        validate_config(Whole, {"pool": {"target": "small", "models": [{**SMALL, "pined": 1}]}})
    assert raised.value.field == "pool.models[0].pined"
    assert "'pinned'" in raised.value.reason
