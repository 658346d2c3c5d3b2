"""A configuration that cannot be served is refused with the setting's name, before models load."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from modelpool.errors import ConfigError, UnsupportedModelError
from specrouter import ChainRouter
from tests.modelpool.factories import VOCAB_SIZE, make_tokenizer, save_llama

Settings = dict[str, Any]


def _set(*path: str | int, to: Any) -> Callable[[Settings], None]:
    """A change of one setting."""

    def change(settings: Settings) -> None:
        place: Any = settings
        for key in path[:-1]:
            if isinstance(place, dict):
                place.setdefault(key, {})
            place = place[key]
        place[path[-1]] = to

    return change


BAD_SETTINGS = {
    "schedular": _set("schedular", to={}),
    "pool.modles": _set("pool", "modles", to=[]),
    "pool.models[0].dtpye": _set("pool", "models", 0, "dtpye", to="float32"),
    "engine.max_reqests": _set("engine", "max_reqests", to=4),
    "scheduler.dept": _set("scheduler", "dept", to=4),
    "server.prot": _set("server", "prot", to=80),
    "pool.target": _set("pool", "target", to="huge"),
    "pool.models": _set("pool", "models", to=[]),
    "pool.models[1].name": _set("pool", "models", 1, "name", to="small"),
    "pool.models[0].source": _set("pool", "models", 0, "source", to="no/such/folder"),
    "pool.models[1].source": _set("pool", "models", 1, "source", to="bundled:tiny-none"),
    "pool.models[0].dtype": _set("pool", "models", 0, "dtype", to="float12"),
    "pool.models[0].device": _set("pool", "models", 0, "device", to="gpu"),
    "engine.max_requests": _set("engine", "max_requests", to=0),
    "engine.max_model_len": _set("engine", "max_model_len", to=-1),
    "engine.prefill_chunk": _set("engine", "prefill_chunk", to=0),
    "engine.kv_budget_tokens": _set("engine", "kv_budget_tokens", to=0),
    "scheduler.depth": _set("scheduler", "depth", to=0),
    "scheduler.policy": _set("scheduler", "policy", to="clever"),
    "server.port": _set("server", "port", to=-1),
    "slo_classes.chat.tpot_ms": _set("slo_classes", to={"chat": {"tpot_ms": 0}}),
    "slo_classes.chat.tpot": _set("slo_classes", to={"chat": {"tpot": 50}}),
}
BAD_CHAINS = {
    "a member that is not in the pool": ["tiny", "target"],
    "another end than the target": ["small", "middle"],
    "no member": [],
    "a member twice": ["small", "small", "target"],
}


@pytest.fixture
def settings(small_config: Settings) -> Settings:
    return copy.deepcopy(small_config)


@pytest.mark.parametrize("field", BAD_SETTINGS)
def test_a_bad_setting_is_refused_by_its_name(field: str, settings: Settings) -> None:
    BAD_SETTINGS[field](settings)
    _assert_refused(settings, field)


@pytest.mark.parametrize("missing", ["target", "models"])
def test_a_missing_setting_is_refused_by_its_name(missing: str, settings: Settings) -> None:
    del settings["pool"][missing]
    _assert_refused(settings, f"pool.{missing}")


@pytest.mark.parametrize("chain", BAD_CHAINS.values(), ids=BAD_CHAINS.keys())
def test_a_static_chain_must_lead_to_the_target(chain: list[str], settings: Settings) -> None:
    settings["scheduler"] = {"policy": "static", "chain": chain}
    _assert_refused(settings, "scheduler.chain")


def test_the_static_policy_needs_a_chain(settings: Settings) -> None:
    settings["scheduler"] = {"policy": "static"}
    error = _assert_refused(settings, "scheduler.chain")
    assert "chain" in str(error)


def test_a_missing_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        ChainRouter.from_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize("text", ["pool: [", "- just\n- a list\n", ""])
def test_a_file_without_settings_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        ChainRouter.from_config(file)


def test_another_tokenizer_is_refused_with_both_names(settings: Settings, tmp_path: Path) -> None:
    other = save_llama(tmp_path, seed=5)
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    cast(Any, PreTrainedTokenizerFast)(tokenizer_object=tokenizer).save_pretrained(str(other))
    settings["pool"]["models"][0]["source"] = str(other)
    error = _assert_refused(settings, "pool.models[0].source")
    assert "'small'" in str(error)
    assert "'target'" in str(error)


@pytest.fixture
def bloom(tmp_path: Path) -> str:
    """A checkpoint whose attention cannot be dispatched."""
    bloom = BloomForCausalLM(
        BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=1, n_head=2)
    )
    bloom.save_pretrained(str(tmp_path))
    make_tokenizer(tmp_path)
    return str(tmp_path)


def test_a_target_without_the_plug_in_is_refused(settings: Settings, bloom: str) -> None:
    settings["pool"]["models"][2]["source"] = bloom
    with pytest.raises(UnsupportedModelError) as caught:
        ChainRouter.from_config(settings)
    assert caught.value.field == "pool.models[2].source"
    assert "Bloom" in str(caught.value)


def test_a_drafter_without_the_plug_in_is_left_out(settings: Settings, bloom: str) -> None:
    settings["pool"]["models"][0]["source"] = bloom
    with ChainRouter.from_config(settings) as router:
        assert router.pool.names == ("middle", "target")
        assert list(router.pool.left_out) == ["small"]
        assert router.generate([[5, 6, 7]])[0].finish_reason in ("length", "eos")


def test_a_fixed_chain_with_a_drafter_that_is_left_out_is_refused(
    settings: Settings, bloom: str
) -> None:
    settings["pool"]["models"][0]["source"] = bloom
    settings["scheduler"] = {"policy": "static", "chain": ["small", "target"]}
    error = _assert_refused(settings, "scheduler.chain")
    assert "'small'" in str(error)


def _assert_refused(settings: Settings, field: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ChainRouter.from_config(settings)
    assert caught.value.field == field
    assert field in str(caught.value)
    return caught.value
