"""`source: quantised:TARGET`: what a pool makes of a twin, what it shares, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelpool import ModelPool
from modelpool.config import PoolConfig, validate_config
from modelpool.device_manager import DeviceInfo
from modelpool.fast.lean_forward import LeanForward
from modelpool.packed_model import PackedModel
from modelpool.twin import share_weights
from test_support.factories import pool_of, save_llama
from tests.modelpool.compressed import compress, logits, needs_int8
from tests.modelpool.refused import refused

GIB = 2**30
FIELD = "pool.models[0]"


def twins(path: Path, target: dict[str, Any] | None = None, **twin: Any) -> dict[str, Any]:
    """A pool of a model and its twin."""
    model = {"name": "m", "source": str(path), "device": "cpu", **(target or {})}
    return {"target": "m", "models": [{"name": "t", "source": "quantised:m", **twin}, model]}


def embedding(model: PackedModel) -> torch.Tensor:
    weight = model.model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


@needs_int8
@pytest.mark.parametrize(
    ("of_target", "of_twin", "weights"),
    [("auto", "auto", "int8"), ("auto", "int4", "int4"), ("int8", "int4", "int4")],
)
def test_a_twin_is_the_same_checkpoint_in_fewer_bits(
    of_target: str, of_twin: str, weights: str, tmp_path: Path
) -> None:
    save_llama(tmp_path, dtype="bfloat16")
    own = {"weights": of_twin, "threads": 1, "pinned": True, "dtype": "bfloat16"}
    pool = ModelPool.from_config(twins(tmp_path, {"weights": of_target}, **own))
    twin, model = pool.get("t"), pool.get("m")
    assert pool.names == ("t", "m")
    assert pool.path("t") == pool.path("m")
    assert pool.parameter_count("t") == pool.parameter_count("m")
    kept = "plain" if of_target == "auto" else of_target
    assert (pool.plan("t").weights, pool.plan("m").weights) == (weights, kept)
    assert twin.threads == 1
    assert twin.kv_bytes_per_token == model.kv_bytes_per_token
    alone = pool_of(tmp_path, weights=weights).get("m")
    assert torch.equal(logits(twin), logits(alone))
    assert not torch.equal(logits(twin), logits(model))


@needs_int8
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_not_quantised_is_in_memory_once(tied: bool, tmp_path: Path) -> None:
    save_llama(tmp_path, dtype="bfloat16", tied=tied)
    pool = ModelPool.from_config(twins(tmp_path, dtype="bfloat16"))
    model, before = pool.get("m"), logits(pool.get("m"))
    twin = pool.get("t")
    assert isinstance(twin.shortcut, LeanForward)
    assert embedding(twin).data_ptr() == embedding(model).data_ptr()
    assert torch.equal(logits(model), before)
    alone = ModelPool.from_config(twins(tmp_path, dtype="bfloat16")).get("t")  # without the target
    assert embedding(alone).data_ptr() != embedding(model).data_ptr()
    assert torch.equal(logits(twin), logits(alone))
    with torch.no_grad():  # what it computes with is what it shares
        embedding(model).zero_()
    assert not torch.equal(logits(twin), logits(alone))


def test_only_equal_parameters_are_shared() -> None:
    one, other = ([nn.Embedding(4, 3) for _ in range(3)] for _ in range(2))
    own = [each.weight.detach().clone() for each in one]
    with torch.no_grad():
        other[0].weight.copy_(own[0])
        other[1].weight.copy_(own[1])[0, 0] += 1.0
        other[2].weight.data = own[2].double()
    twin, target = nn.ModuleList(one), nn.ModuleList(other)
    assert share_weights(twin, target) == 4 * 3 * 4
    assert one[0].weight.data_ptr() == other[0].weight.data_ptr()
    assert share_weights(twin, target) == 0
    assert all(torch.equal(each.weight, was) for each, was in zip(one, own, strict=True))


@pytest.mark.parametrize(
    ("change", "field", "word"),
    [
        ({"source": "quantised:nobody"}, "source", "'nobody' is not the target 'm'"),
        ({"source": "quantised:t"}, "source", "'t' is not the target 'm'"),
        ({"inflate_to": 2_000_000}, "inflate_to", "has that of m"),
        ({"revision": "main"}, "revision", "has that of m"),
        ({"target": {"weights": "int8"}}, "source", "'m' is in int8 itself"),
        ({"target": {"weights": "int4"}, "weights": "int4"}, "source", "'m' is in int4 itself"),
    ],
)
def test_a_twin_is_of_the_target_and_has_what_that_has(
    change: dict[str, Any], field: str, word: str, tmp_path: Path
) -> None:
    with refused(f"{FIELD}.{field}", re.escape(word)):
        validate_config(PoolConfig, twins(tmp_path, **change), "pool")


def test_a_twin_cannot_be_the_target_and_stands_alone(tmp_path: Path) -> None:
    settings = twins(tmp_path)
    with refused("pool.target", "only drafts"):
        validate_config(PoolConfig, settings | {"target": "t"}, "pool")
    settings["models"].append({"name": "u", "source": "quantised:m"})
    with refused("pool.models[2].source", r"the source of models\[0\] already"):
        validate_config(PoolConfig, settings, "pool")


def test_a_checkpoint_that_is_quantised_has_no_twin(tmp_path: Path) -> None:
    save_llama(tmp_path, dtype="bfloat16")
    compress(tmp_path)
    with refused(f"{FIELD}.source", "is quantised already: 'm' can have no twin"):
        ModelPool.from_config(twins(tmp_path))


@needs_int8
def test_a_twin_is_on_the_cpu_wherever_its_target_is(tmp_path: Path) -> None:
    save_llama(tmp_path, dtype="bfloat16")
    devices = DeviceInfo("cuda:0", GIB, GIB), DeviceInfo("cpu", GIB, GIB)

    def pool_of(**twin: Any) -> ModelPool:
        settings = twins(tmp_path, {"device": "auto"}, **twin)
        return ModelPool(validate_config(PoolConfig, settings, "pool"), devices=devices)

    pool = pool_of()
    assert (pool.placement("m").device, pool.placement("t").device) == ("cuda:0", "cpu")
    with refused(f"{FIELD}.device", "a twin runs on the CPU"):
        pool_of(device="cuda:0")
