"""Outliers of activations, planted with small columns of weights: the function is the same."""

from pathlib import Path

from torch import Tensor

from test_support.factories import edit_weights

_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def plant(path: Path, factor: float = 128.0, every: int = 16) -> None:
    """In the inputs of each projection but the attention's output, in one channel of `every`.

    `factor`: a power of two, so that the plain model keeps its bits.
    """
    edit_weights(path, lambda tensors: _plant(tensors, factor, every))


def _plant(tensors: dict[str, Tensor], factor: float, every: int) -> None:
    for name in [one for one in tensors if one.endswith("layernorm.weight")]:
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        tensors[name][3::every] *= factor
        readers = [one for one in tensors if one.startswith(f"{layer}.mlp.")]
        readers = [one for one in readers if "down" not in one]
        if norm == "input_layernorm":
            readers = [f"{layer}.{one}.weight" for one in _READERS[norm]]
        for reader in readers:
            tensors[reader][:, 3::every] /= factor
    for name in [one for one in tensors if "up_proj" in one]:
        tensors[name][5::every] *= factor
        tensors[name.replace("up_proj", "down_proj")][:, 5::every] /= factor
