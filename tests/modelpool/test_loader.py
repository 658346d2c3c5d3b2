"""Loading takes safetensors, in the dtype that was asked for, and says whose fault a failure is."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.config import ModelConfig
from modelpool.device_manager import Placement
from modelpool.errors import ConfigError
from modelpool.loader import load_model
from tests.modelpool.factories import VOCAB_SIZE, save_llama

FIELD = "pool.models[0]"


def config(**options: str) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "source": "path:m", **options})


def test_auto_is_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    save_llama(tmp_path, dtype="bfloat16")
    model = load_model(config(), tmp_path, Placement("cpu"), VOCAB_SIZE, FIELD)
    assert (model.dtype, model.vocab_size, model.device.type) == (torch.bfloat16, VOCAB_SIZE, "cpu")
    wide = load_model(config(dtype="float64"), tmp_path, Placement("cpu"), VOCAB_SIZE, FIELD)
    assert wide.dtype == torch.float64


def test_nothing_is_printed_where_there_is_no_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_llama(tmp_path)
    capfd.readouterr()
    load_model(config(), tmp_path, Placement("cpu"), VOCAB_SIZE, FIELD)
    assert capfd.readouterr() == ("", "")


def test_weights_that_cannot_be_read_name_the_source(tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError) as caught:
        load_model(config(), tmp_path, Placement("cpu"), VOCAB_SIZE, FIELD)
    assert caught.value.field == f"{FIELD}.source"


def test_weights_that_are_not_whole_name_the_source(tmp_path: Path) -> None:
    file = save_llama(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="cannot load") as caught:
        load_model(config(), tmp_path, Placement("cpu"), VOCAB_SIZE, FIELD)
    assert caught.value.field == f"{FIELD}.source"


def test_weights_that_are_missing_are_refused_and_not_invented(tmp_path: Path) -> None:
    save_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"mlp\.up_proj"):
        load_model(config(), tmp_path, Placement("cpu"), VOCAB_SIZE, FIELD)


def test_an_architecture_that_the_plug_in_refuses_names_the_source(tmp_path: Path) -> None:
    save_llama(tmp_path)
    with pytest.raises(ConfigError) as caught:  # more ids than the model has outputs
        load_model(config(), tmp_path, Placement("cpu"), VOCAB_SIZE + 1, FIELD)
    assert caught.value.field == f"{FIELD}.source"
