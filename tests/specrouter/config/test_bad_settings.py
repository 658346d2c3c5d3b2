"""Files of models that cannot be served are refused with the setting's name, or left out."""

import copy
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from modelpool.errors import ConfigError, UnsupportedModelError
from specrouter import ChainRouter
from tests.modelpool.factories import VOCAB_SIZE, make_tokenizer, save_llama

Settings = dict[str, Any]


@pytest.fixture
def settings(small_config: Settings) -> Settings:
    return copy.deepcopy(small_config)


@pytest.mark.parametrize(
    ("number", "source"), [(0, "no/such/folder"), (1, "bundled:tiny-none"), (2, 3)]
)
def test_a_bad_source_is_refused_by_its_name(number: int, source: Any, settings: Settings) -> None:
    settings["pool"]["models"][number]["source"] = source
    _assert_refused(settings, f"pool.models[{number}].source")


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
    config = BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(str(tmp_path))
    make_tokenizer(tmp_path)
    return str(tmp_path)


def test_a_target_without_the_plug_in_is_refused(settings: Settings, bloom: str) -> None:
    settings["pool"]["models"][2]["source"] = bloom
    error = _assert_refused(settings, "pool.models[2].source")
    assert isinstance(error, UnsupportedModelError)
    assert "Bloom" in str(error)


def test_a_drafter_without_the_plug_in_is_left_out(settings: Settings, bloom: str) -> None:
    settings["pool"]["models"][0]["source"] = bloom
    with ChainRouter.from_config(settings) as router:
        assert router.pool.names == ("middle", "target")
        assert list(router.pool.left_out) == ["small"]
        assert router.generate([[5, 6, 7]])[0].finish_reason in ("length", "eos")
    settings["scheduler"] = {"policy": "static", "chain": ["small", "target"]}
    assert "'small'" in str(_assert_refused(settings, "scheduler.chain"))


def _assert_refused(settings: Settings, field: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ChainRouter.from_config(settings)
    assert caught.value.field == field
    assert field in str(caught.value)
    return caught.value
