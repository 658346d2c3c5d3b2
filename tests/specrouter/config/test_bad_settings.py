"""Files of models that cannot be served are refused with the setting's name, or left out."""

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, BloomForCausalLM

from modelpool.errors import ConfigError
from specrouter import ChainRouter
from specrouter.bench.conditions import conditions
from test_support.factories import VOCAB_SIZE, make_tokenizer

Settings = dict[str, Any]


@pytest.fixture
def settings(small_config: Settings) -> Settings:
    return copy.deepcopy(small_config)


@pytest.fixture
def bloom(tmp_path: Path) -> str:
    """A checkpoint whose attention cannot be dispatched."""
    config = BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(str(tmp_path))
    make_tokenizer(tmp_path)
    return str(tmp_path)


def test_a_drafter_without_the_plug_in_is_left_out(settings: Settings, bloom: str) -> None:
    settings["pool"]["models"][0]["source"] = bloom
    with ChainRouter.from_config(settings) as router:
        assert router.pool.names == ("middle", "target")
        assert list(router.pool.left_out) == ["small"]
        assert router.generate([[5, 6, 7]])[0].finish_reason in ("length", "eos")
        assert list(conditions(router)["models"]) == ["middle", "target"], "figures are not lost"
    settings["scheduler"] = {"policy": "static", "chain": ["small", "target"]}
    with pytest.raises(ConfigError, match=r"^scheduler\.chain: .*'small'"):
        ChainRouter.from_config(settings)
