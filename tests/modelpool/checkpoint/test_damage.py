"""What is wrong with a checkpoint is told in one line, before anything is served."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from test_support.factories import edit_config, edit_weights, pool_of, save_llama
from tests.modelpool.refused import refused

UP = "model.layers.1.mlp.up_proj.weight"
HALVES = ("a.safetensors", "b.safetensors")


def edit_index(path: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    """Of two files of weights; what `edit` returns is written, or what it made of the map."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    for file, part in zip(HALVES, (names[::2], names[1::2]), strict=True):
        save_file({name: weights[name] for name in part}, path / file, {"format": "pt"})
    where = {name: HALVES[at % 2] for at, name in enumerate(names)}
    index = edit(where) or {"metadata": {}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def declare(path: Path, **settings: Any) -> None:
    (path / "config.json").write_text(json.dumps(settings))


NO_INDICES: list[Any] = [[1], "text", {"metadata": {}}, {"metadata": {}, "weight_map": {"a": 1}}]


def indexed(index: Any) -> Callable[[Path], Any]:
    return lambda path: edit_index(path, lambda _: index)


# Told by configuration, tokenizer and headers: by `specrouter check` too.
TOLD_EARLY: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing tensor": (lambda p: edit_weights(p, lambda w: w.pop(UP)), "lacks 2,048 of its"),
    "a smaller tensor": (
        lambda p: edit_weights(p, lambda w: w.update({UP: w[UP][1:]})),
        "lacks 32",
    ),
    "a missing file": (
        lambda p: edit_index(p, lambda where: where.update(x="c.safetensors")),
        "No such file or directory: .*c.safetensors",
    ),
    "an index of other files": (
        lambda p: edit_index(p, lambda where: where.update({UP: "b.safetensors", "x": HALVES[0]})),
        "index.json says that .* is in .*.safetensors, where it is not",
    ),
    "an index that leads elsewhere": (
        lambda p: edit_index(p, lambda where: where.update(x="../c.safetensors")),
        "is no index",
    ),
    **{f"an index like {index}": (indexed(index), "is no index") for index in NO_INDICES},
    "a head smaller than the tokenizer": (
        lambda p: edit_config(p, vocab_size=300),
        "embeds 300 ids, and the tokenizer of 'm' has 320",
    ),
    # Which transformers would fill with the numbers of a default, gigabytes of them.
    "a composite without a text model": (lambda p: declare(p, model_type="mistral3"), "lacks "),
    "a composite whose text model is no configuration": (
        lambda p: declare(p, model_type="gemma3", text_config="a"),
        "cannot read the checkpoint",
    ),
    "no language model": (lambda p: declare(p, model_type="siglip"), "no causal language model"),
}
TOLD_BY_WEIGHTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an extra tensor": (
        lambda p: edit_weights(p, lambda w: w.update({"model.layers.1.extra": torch.zeros(3)})),
        "LlamaForCausalLM has no model.layers.1.extra",
    ),
    "a tensor of another shape": (
        lambda p: edit_weights(p, lambda w: w.update({UP: w[UP].T.contiguous()})),
        rf"{UP} is \[32, 64\], and not \[64, 32\]",
    ),
    "a tensor of no numbers": (
        lambda p: edit_weights(p, lambda w: w[UP].fill_(float("nan"))),
        "its own logits are no numbers in float64: its weights are damaged",
    ),
}


@pytest.mark.parametrize("damage", TOLD_EARLY)
def test_it_is_told_before_weights_are_read(damage: str, tmp_path: Path) -> None:
    harm, reason = TOLD_EARLY[damage]
    harm(save_llama(tmp_path))
    with refused("pool.models[0].source", reason):
        pool_of(tmp_path)


@pytest.mark.parametrize("damage", TOLD_BY_WEIGHTS)
def test_it_is_told_when_weights_are_read(damage: str, tmp_path: Path) -> None:
    harm, reason = TOLD_BY_WEIGHTS[damage]
    harm(save_llama(tmp_path))
    pool = pool_of(tmp_path)
    with refused("pool.models[0].source", reason):
        pool.get("m")


@pytest.mark.parametrize("index", ["{}", '{"metadata": {}, "weight_map": {"a": "b.safetensors"}}'])
def test_an_index_beside_a_single_file_is_not_looked_at(index: str, tmp_path: Path) -> None:
    (save_llama(tmp_path) / "model.safetensors.index.json").write_text(index)
    assert pool_of(tmp_path).get("m").parameter_count


def test_what_old_checkpoints_store_beside_their_weights_is_no_damage(tmp_path: Path) -> None:
    save_llama(tmp_path)
    mask = {"model.layers.0.attn.masked_bias": torch.zeros(1)}
    edit_weights(tmp_path, lambda weights: weights.update(mask))
    assert pool_of(tmp_path).get("m").parameter_count
