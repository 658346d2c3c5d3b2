"""The pool: order, lazy loading, limits, and what it refuses at construction."""

import gc
import json
import threading
import time
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

from modelpool import ConfigError, ModelPool, PoolFullError
from modelpool.config import ModelConfig, PoolConfig
from modelpool.device_manager import DeviceInfo, Placement
from modelpool.fast.linear import PackedWeight, can_pack
from modelpool.fast.tuning import Tuning
from test_support.factories import VOCAB_SIZE, make_tokenizer, save_gpt2, save_llama
from tests.modelpool.refused import refused


def bytes_of(pool: ModelPool, name: str) -> int:
    """What a model takes in memory, its KV included."""
    return pool.plan(name).footprint.total_bytes(pool.kv_tokens)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "large", layers=4, dtype="float32")
    save_llama(root / "middle", layers=2, seed=1, dtype="float32")
    save_llama(root / "small", layers=1, seed=2, dtype="float32")
    save_gpt2(root / "small-too", layers=1, hidden=16, seed=3, dtype="float32")
    return root


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one size, in bfloat16."""
    root = tmp_path_factory.mktemp("halves")
    for name in ("large", "small", "middle"):
        save_llama(root / name, dtype="bfloat16", tied=False)
    return root


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with AVX2 alone."""
    wide = ("float32", "float64")
    monkeypatch.setattr("modelpool.placed_members.computes_in", lambda dtype: dtype in wide)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelpool.placed_members.computes_in", lambda dtype: True)


def config(models: Path, names: tuple[str, ...], target: str, **settings: Any) -> dict[str, Any]:
    pinned = settings.pop("pinned", ())
    members = [
        {"name": name, "source": f"path:{models / name}", "pinned": name in pinned}
        for name in names
    ]
    return {"target": target, "models": members, **settings}


ALL = ("large", "small", "middle", "small-too")
PAIR = ("large", "small")
CUDA, CPU = (DeviceInfo(name, 2**30, 2**30) for name in ("cuda:0", "cpu"))


class Loads:
    """A loader that counts, and fails when told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.dtypes: list[str] = []
        self.tunings: list[Tuning] = []
        self.out_of_memory_on: tuple[str, ...] = ()
        self.seconds = 0.0

    def __call__(
        self,
        config: ModelConfig,
        path: Path,
        placement: Placement,
        vocab_size: int,
        field: str,
        tuning: Tuning,
    ) -> Any:
        self.calls.append((config.name, placement.device))
        self.dtypes.append(config.dtype)
        self.tunings.append(tuning)
        time.sleep(self.seconds)
        if placement.device in self.out_of_memory_on:
            raise torch.OutOfMemoryError("no memory")
        return object()


def counted(raw: dict[str, Any], **options: Any) -> tuple[ModelPool, Loads]:
    loads = Loads()
    return ModelPool(PoolConfig.model_validate(raw), loader=loads, **options), loads


def test_an_added_token_of_images_is_none_of_texts(tmp_path: Path) -> None:
    """As of Gemma 3 1B, whose embedding has no row for it."""
    for name, rows in (("target", VOCAB_SIZE), ("whole", VOCAB_SIZE), ("less", VOCAB_SIZE - 1)):
        save_llama(tmp_path / name, vocab_size=rows)
        tokenizer = make_tokenizer(tmp_path / name)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        tokenizer.save_pretrained(str(tmp_path / name))
    pool = ModelPool.from_config(config(tmp_path, ("whole", "target"), "target"))
    assert (len(pool.tokenizer), pool.vocab_size) == (VOCAB_SIZE + 1, VOCAB_SIZE)
    assert pool.get("target").vocab_size == VOCAB_SIZE
    save_llama(tmp_path / "target", vocab_size=VOCAB_SIZE + 1)  # which does know it
    tokenizer.save_pretrained(str(tmp_path / "target"))
    for drafter, target, at, needed in (
        ("whole", "target", 0, VOCAB_SIZE + 1),
        ("less", "whole", 0, VOCAB_SIZE),
        ("whole", "less", 1, VOCAB_SIZE),
    ):
        with refused(f"pool.models[{at}].source", f"the tokenizer of {target!r} has {needed}"):
            ModelPool.from_config(config(tmp_path, (drafter, target), target))


def test_threads_that_want_the_same_model_load_it_once(models: Path) -> None:
    pool, loads = counted(config(models, ALL, "large"))
    loads.seconds = 0.05
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda name=name: found.append(pool.get(name)))
        for name in ("small", "middle") * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads.calls) == 2
    assert len(set(map(id, found))) == 2


def test_the_least_recently_used_idle_model_is_evicted(models: Path) -> None:
    pool, _ = counted(config(models, ALL, "large", max_loaded_models=3))
    for name in ("large", "small", "middle", "small", "small-too"):
        pool.get(name)
    assert [name for name in pool.names if pool.is_loaded(name)] == ["small-too", "small", "large"]


def test_pinned_models_the_target_and_models_in_use_are_never_evicted(models: Path) -> None:
    pool, _ = counted(config(models, ALL, "large", max_loaded_models=3, pinned=("small",)))
    pool.get("large")
    pool.get("small")
    pool.acquire("middle")
    with pytest.raises(PoolFullError, match="small-too"):
        pool.get("small-too")
    assert not pool.evict("middle")
    assert not pool.evict("small")
    assert not pool.evict("large")
    pool.release("middle")
    pool.get("small-too")
    assert not pool.is_loaded("middle")


def test_a_memory_limit_counts_weights_and_kv(models: Path) -> None:
    raw = config(models, ALL, "large", memory_limit_mb=1)
    pool, _ = counted(raw)
    for name in pool.names:
        pool.get(name)
    assert all(pool.is_loaded(name) for name in pool.names)
    pool, _ = counted(raw, kv_tokens=lambda _: 2000)  # the target's 4 layers alone: 1 MB of KV
    pool.get("small")
    pool.get("large")
    assert not pool.is_loaded("small")


def test_models_fit_together_beside_those_that_are_never_evicted(models: Path) -> None:
    free, _ = counted(config(models, ALL, "large"))
    assert free.fit_together(ALL)
    two, _ = counted(config(models, ALL, "large", max_loaded_models=2))
    assert two.fit_together(("small", "large"))
    assert not two.fit_together(("small", "middle", "large"))
    assert not two.fit_together(("small", "middle"))
    pinned, _ = counted(config(models, ALL, "large", max_loaded_models=2, pinned=("small",)))
    assert pinned.fit_together(("small", "large"))
    assert not pinned.fit_together(("middle", "large"))


def test_out_of_memory_sends_a_drafter_to_the_cpu_and_fails_the_target(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool, loads = counted(config(models, ALL, "large"), devices=[CUDA, CPU])
    loads.out_of_memory_on = ("cuda:0",)
    pool.get("small")
    assert loads.calls == [("small", "cuda:0"), ("small", "cpu")]
    assert pool.placement("small").device == "cpu"
    assert "small" in caplog.text
    with refused("pool.models[0].device"):
        pool.get("large")
    assert not pool.is_loaded("large")


def test_a_small_half_precision_drafter_runs_in_float32_and_is_accounted_so(
    halves: Path, native: None
) -> None:
    pool = ModelPool.from_config(config(halves, PAIR, "large"), kv_tokens=lambda _: 100)
    small, large = pool.get("small"), pool.get("large")
    assert (small.dtype, large.dtype) == (torch.float32, torch.bfloat16)
    assert (small.threads, large.threads) == (1, torch.get_num_threads())
    assert bytes_of(pool, "small") == 2 * bytes_of(pool, "large")
    assert pool.config.models[1].dtype == "auto"  # as it was declared


def test_a_drafter_that_fits_neither_its_device_nor_the_cpu_is_not_loaded(
    halves: Path, native: None
) -> None:
    devices = [CUDA, DeviceInfo("cpu", 1000, 2**30)]
    pool, loads = counted(config(halves, PAIR, "large"), devices=devices)
    loads.out_of_memory_on = ("cuda:0",)
    for _ in range(2):
        with pytest.raises(PoolFullError):
            pool.get("small")
    assert loads.calls == [("small", "cuda:0")] * 2
    assert pool.placement("small").device == "cuda:0"


@pytest.mark.parametrize("most", [None, 2])
def test_what_is_never_loaded_together_need_not_fit_together(
    most: int | None, halves: Path, emulated: None
) -> None:
    names = (*PAIR, "middle")
    raw = config(halves, names, "large", max_loaded_models=most)
    size = bytes_of(ModelPool.from_config({**raw, "max_loaded_models": None}), "large")
    pool, _ = counted(raw, devices=[DeviceInfo("cpu", int(2.1 * size), 0)])
    dtypes = {pool.plan(name).dtype for name in names}
    assert dtypes == ({"float32"} if most == 2 else {"float32", "bfloat16"})


def test_a_failed_load_leaves_the_pool_as_it_was(models: Path) -> None:
    pool, loads = counted(config(models, ALL, "large"))
    loads.out_of_memory_on = ("cpu",)
    with pytest.raises(torch.OutOfMemoryError):
        pool.acquire("small")
    loads.out_of_memory_on = ()
    pool.get("small")
    assert pool.evict("small")


def test_another_tokenizer_is_refused_with_both_names(models: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "other")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    content["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(content))
    raw = config(models, PAIR, "large")
    raw["models"].append({"name": "other", "source": str(other)})
    with refused("pool.models[2].source", r"'other'.*'large'"):
        ModelPool.from_config(raw)


def with_ngram(raw: dict[str, Any]) -> dict[str, Any]:
    return {**raw, "models": [*raw["models"], {"name": "quoter", "source": "ngram"}]}


def test_a_member_without_a_model_is_the_weakest_and_always_there(models: Path) -> None:
    raw = with_ngram(config(models, PAIR, "large"))
    pool = ModelPool.from_config(raw, kv_tokens=lambda _: 1000)
    assert pool.names == ("quoter", "small", "large")
    assert [name in pool.draft_only for name in pool.names] == [True, False, False]
    assert pool.parameter_count("quoter") == 0
    assert pool.max_positions("quoter") == 2**31
    assert pool.is_loaded("quoter")
    assert not pool.evict("quoter")


def test_a_member_without_a_model_has_no_model_to_get(models: Path) -> None:
    pool = ModelPool.from_config(with_ngram(config(models, ("large",), "large")))
    for method in (pool.get, pool.acquire, pool.path, pool.placement):
        with pytest.raises(ValueError, match="'quoter' has no model"):
            method("quoter")
    with pytest.raises(KeyError):
        pool.parameter_count("absent")


def test_a_pool_of_headers_alone_plans_as_one_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers: dict[str, list[Any]] = {}
    for name, layers in (("large", 4), ("small", 1)):
        file = save_llama(tmp_path / name, layers=layers, dtype="bfloat16") / "model.safetensors"
        content = file.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        headers[name] = [{key: one for key, one in header.items() if key != "__metadata__"}]
    raw = PoolConfig.model_validate(config(tmp_path, ("large", "small"), "large"))
    whole = ModelPool(raw)
    for name in headers:
        (tmp_path / name / "model.safetensors").unlink()

    def resolve(source: str, **_: Any) -> tuple[Path, list[Any]]:
        path = Path(source.removeprefix("path:"))
        return path, headers[path.name]

    monkeypatch.setattr("modelpool.member.resolve_headers", resolve)
    bare = ModelPool(raw, headers_only=True)
    assert [bare.plan(name) for name in bare.names] == [whole.plan(name) for name in whole.names]
    assert bare.plan("small").dtype == "float32"  # so its bytes were counted twice
    with pytest.raises(ConfigError):
        bare.get("small")


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN without bfloat16")
@pytest.mark.parametrize("pack_weights", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_take_what_their_footprint_says(
    tied: bool, dtype: str, pack_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed head is a copy of the embedding that it is tied to, in the target and a drafter."""
    packed: WeakSet[PackedWeight] = WeakSet()
    pack = PackedWeight.__init__

    def packing(self: PackedWeight, *parts: Any) -> None:
        packed.add(self)
        pack(self, *parts)

    monkeypatch.setattr(PackedWeight, "__init__", packing)
    for name in PAIR:
        save_llama(tmp_path / name, layers=1, hidden=512, tied=tied, dtype=dtype)
    settings = config(tmp_path, PAIR, "large", pack_weights=pack_weights)
    pool = ModelPool(PoolConfig.model_validate(settings))
    for name in PAIR:
        packed.clear()
        model = pool.get(name)
        gc.collect()
        held = sum(one.out_features * one.in_features * one.dtype.itemsize for one in packed)
        held += sum(one.nbytes for one in model.model.parameters() if not one.is_meta)
        assert pool.plan(name).footprint.weight_bytes == held, name


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN without bfloat16")
def test_a_drafter_whose_head_is_copied_on_the_cpu_stays_there(tmp_path: Path) -> None:
    """With the copy it is larger than the other, which was placed before it."""
    save_llama(tmp_path / "large", hidden=64, layers=2, dtype="bfloat16", tied=True)
    save_llama(tmp_path / "small", hidden=128, layers=2, dtype="bfloat16", tied=True)
    save_llama(tmp_path / "middle", hidden=64, layers=9, dtype="bfloat16", tied=True)
    settings = config(tmp_path, ("small", "middle", "large"), "large")
    settings["models"][0]["dtype"] = "bfloat16"
    target, small, middle = 189_056, 673_024, 706_944
    room = DeviceInfo("cuda:0", target + middle + 50_000, 0)
    pool = ModelPool(PoolConfig.model_validate(settings), devices=[room, CPU])
    assert [pool.placement(name).device for name in pool.models] == ["cpu", "cuda:0", "cuda:0"]
    taken = [pool.plan(name).footprint.weight_bytes for name in pool.models]
    assert taken == [small + 2 * 320 * 128, middle, target]
