"""Linear layers in int8 and int4, which replace a model's own on the CPU.

Contract: see `Int8Weight`. Layers that read the same input (query, key and value; gate and up) may
share one product (`fast.joined`); each of them alone then computes all outputs and keeps its part.

With `int4`, a layer that loses too much in 4 bits is in int8, and so is the head, whose error no
later layer corrects. Blocks of a GGUF file are kept as they are if there are kernels for them.
Routers and gates of one number stay plain, unless the checkpoint has them in so few bits.
"""

import ctypes
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import tqdm

from modelpool.attention.latent import latent_weight
from modelpool.checkpoint.architecture import chooses, expert_count
from modelpool.checkpoint.block_values import BlockValues, StoredBlocks
from modelpool.checkpoint.int4_values import in_4_bits
from modelpool.checkpoint.int8_values import Int8Values
from modelpool.config import KeptWeights
from modelpool.fast.cpu import has_amx, int8_refusal
from modelpool.fast.int8 import Int8Weight
from modelpool.fast.linear import is_hooked
from modelpool.fast.panels import BlockWeight, Int8PanelWeight, PanelWeight, exact_kernels
from modelpool.kernels.library import LinearKernels

ARITHMETIC = 9  # to be raised when the same weights give other texts


Values = Int8Values | BlockValues  # a weight as the checkpoint stores it
Stored = Int8Values | StoredBlocks  # the same, before it is read
QuantisedWeight = Int8Weight | PanelWeight

# Limit for int4: normally distributed weights have 0.08, those with heavy tails more.
_MOST_ERROR = 0.1


class QuantisedLinear(nn.Module):
    """A linear layer in int8 or int4: the outputs from `start` on of a weight it may share."""

    def __init__(
        self,
        weight: QuantisedWeight,
        start: int,
        out_features: int,
        bias: Tensor | None,
        is_tied: bool,
        rounding: tuple[KeptWeights, float] | None = None,
    ) -> None:
        """Use outputs of a quantised weight.

        Args:
            weight: the quantised weight.
            start: its first output that belongs to the layer.
            out_features: number of the layer's outputs.
            bias: the layer's part of the weight's bias.
            is_tied: an embedding keeps the plain weight.
            rounding: the format it was rounded to, and its relative error; None if the checkpoint
                has the weight in that format.
        """
        super().__init__()
        self.roundings = [] if rounding is None else [rounding]
        self.in_features, self.out_features = weight.in_features, out_features
        self.hidden_parameters = 0 if is_tied else self.in_features * out_features
        self.bias = bias
        self.shared, self._start = weight, start

    def share(self, weight: QuantisedWeight, start: int) -> None:
        """Replace its own weight by one that has the same outputs from `start` on."""
        self.shared, self._start = weight, start

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features], for any leading shape."""
        return self.shared.multiply(x).narrow(-1, self._start, self.out_features)


class QuantisedEmbedding(nn.Module):
    """An embedding whose rows are outputs of a weight in panels, which a tied head shares."""

    max_norm = None

    def __init__(self, weight: PanelWeight, plain: nn.Embedding) -> None:
        """Replace `plain`, whose weight may be on the device `meta`."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.hidden_parameters = self.num_embeddings * self.embedding_dim
        self.shared, self._dtype = weight, plain.weight.dtype
        if hasattr(plain, "embed_scale"):
            self.embed_scale = plain.embed_scale

    def rows(self, ids: Tensor) -> Tensor:
        """Map [n] int64 to [n, embedding_dim] float32, not scaled."""
        return self.shared.rows(ids)

    def forward(self, ids: Tensor) -> Tensor:
        """Map [...] to [..., embedding_dim] in the model's dtype."""
        found = self.rows(ids.flatten()).to(self._dtype).view(*ids.shape, -1)
        if hasattr(self, "embed_scale"):
            found = found * torch.as_tensor(self.embed_scale).to(self._dtype)
        return found


def embedded(embedding: nn.Module, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Map tokens [T] to [T, hidden] in `dtype`, not scaled."""
    if isinstance(embedding, QuantisedEmbedding):
        return embedding.rows(tokens).to(dtype)
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    return weight.detach().index_select(0, tokens).to(dtype)


def quantise_embeddings(model: Any, stored: Mapping[str, StoredBlocks]) -> None:
    """Replace embeddings of `model`, by name, with the checkpoint's blocks, in place.

    Its linear layers are quantised already. A tied head shares its weight with the first embedding.
    """
    kernels, head, first = exact_kernels(), _head(model), model.get_input_embeddings()
    assert kernels is not None, "there are blocks only with kernels"
    is_tied = isinstance(head, QuantisedLinear) and head.hidden_parameters == 0
    for name, blocks in stored.items():
        plain = model.get_submodule(name)
        if is_tied and plain is first:
            weight: QuantisedWeight = cast(Any, head).shared
        else:
            value = blocks.read()[0]
            assert value is not None
            weight = BlockWeight(value, None, kernels)
        assert isinstance(weight, PanelWeight)
        model.set_submodule(name, QuantisedEmbedding(weight, plain))


def quantise_linears(
    model: nn.Module,
    stored: Mapping[str, Stored] | None = None,
    only_stored: bool = False,
    weights: KeptWeights = "int8",
    in_int8: Collection[str] = (),
) -> list[str]:
    """Quantise the linear layers of `model` in place; return the names of those that it cannot.

    The plain weights of a module's layers are freed before those of the next but one are
    quantised; `stored` ones may be on the device `meta`. An embedding that shares a weight keeps
    it.

    Args:
        model: the model.
        stored: weights that the checkpoint has in int8 or in blocks, by the layer's name. They are
            taken as they are.
        only_stored: other layers stay as they are.
        weights: `int4`: in 4 bits, except for the head and for layers that lose too much.
        in_int8: names of more layers that are not in 4 bits.
    """
    given = stored or {}
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    head, experts = _head(model), expert_count(getattr(model, "config", None))
    done: dict[nn.Module, Future[QuantisedLinear]] = {}  # one layer may be used in several places
    left: list[str] = []
    exact_kernels()  # found here once, and not by several threads
    is_inference = torch.is_inference_mode_enabled()

    def replaced(name: str, layer: nn.Module) -> QuantisedLinear:
        in_int4 = weights == "int4" and layer is not head and name not in in_int8
        with torch.inference_mode(is_inference):
            return _replaced(layer, given.get(name), id(layer.weight) in embeddings, in_int4)

    waiting: list[tuple[nn.Module, dict[str, nn.Module]]] = []

    def settle() -> None:
        parent, linears = waiting.pop(0)
        for name, layer in linears.items():
            if layer in done:
                setattr(parent, name, done[layer].result())
        give_back_freed()

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for path, parent in tqdm(list(model.named_modules()), disable=True):  # `counted_loops`
            prefix = f"{path}." if path else ""
            linears = {
                name: each
                for name, each in parent.named_children()
                if _is_linear(each)
                and each is not latent_weight(parent)
                and (prefix + name in given or not chooses(name, _outputs(each), experts))
            }
            fresh = {prefix + name: layer for name, layer in linears.items() if layer not in done}
            able = {name: layer for name, layer in fresh.items() if _can_replace(layer)}
            left += [name for name in fresh if name not in able]
            wanted = {name: able[name] for name in able if not only_stored or name in given}
            done |= {layer: pool.submit(replaced, name, layer) for name, layer in wanted.items()}
            if linears:
                waiting.append((parent, linears))
            if len(waiting) > 1:  # one more than is waited for, so that no thread is idle
                settle()
        while waiting:
            settle()
    return left


def give_back_freed() -> None:
    """Make glibc return freed memory: a model's many copies leave pieces that it would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def roundings(model: nn.Module) -> dict[KeptWeights, list[float]]:
    """Return the relative errors of rounded weights, by their format."""
    found = dict[KeptWeights, list[float]]()
    for module in model.modules():
        for kept, error in getattr(module, "roundings", ()):
            found.setdefault(kept, []).append(error)
    return found


def _replaced(
    layer: nn.Module, kept: Stored | None, is_tied: bool, in_int4: bool
) -> QuantisedLinear:
    """Return a layer's replacement; the layer loses its weight, `kept` is the checkpoint's."""
    bias = layer.bias.detach() if isinstance(layer.bias, Tensor) else None
    plain = _weight(layer).detach()
    value = kept.read()[0] if isinstance(kept, StoredBlocks) else kept
    if value is None and isinstance(kept, StoredBlocks) and plain.is_meta:
        plain = kept.plain()[0].to(plain.dtype)
    weight, rounding = weight_of(plain, value, bias, in_int4)
    outputs = len(plain)
    layer.register_parameter("weight", None)
    return QuantisedLinear(weight, 0, outputs, bias, is_tied, rounding)


def weight_of(
    plain: Tensor, value: Values | None, bias: Tensor | None, in_int4: bool
) -> tuple[QuantisedWeight, tuple[KeptWeights, float] | None]:
    """Return a weight [out, in] in its final format, and its rounding.

    The format is the checkpoint's, or int4 if that is requested and accurate enough, else int8. The
    rounding is as in `QuantisedLinear`. `value` is the checkpoint's form of the weight; with
    kernels, `plain` is not read then. `bias` is [out].
    """
    kernels = exact_kernels()
    kept, rounding = _kept(plain, value, in_int4, kernels is not None)
    if isinstance(kept, BlockValues):
        assert kernels is not None, "there are blocks only with kernels"
        return BlockWeight(kept, bias, kernels), rounding
    if kernels is None or int8_kernels() is None:
        return Int8Weight(kept, bias), rounding
    return Int8PanelWeight(kept, bias, kernels), rounding


def chained(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Join weights of the same inputs in the first one, which then has all outputs.

    All of them are in panels, or none is.
    """
    first, *others = cast(Any, weights)
    return cast(QuantisedWeight, first.followed_by(others) if others else first)


def _kept(
    plain: Tensor, value: Values | None, in_int4: bool, has_kernels: bool
) -> tuple[Values, tuple[KeptWeights, float] | None]:
    """Return a weight in its final format, and its rounding."""
    if value is not None and (has_kernels or isinstance(value, Int8Values)):
        return value, None
    if in_int4 and has_kernels:
        small = in_4_bits(plain)
        error = small.relative_error(plain)
        if error <= _MOST_ERROR:
            return small, ("int4", error)
    wide = BlockValues.rounded(plain) if has_kernels else Int8Values.of(plain)
    return wide, ("int8", wide.relative_error(plain))


def int8_kernels() -> LinearKernels | None:
    """Return the kernels for W8A8 checkpoints, or None where oneDNN is exact and as fast.

    With AVX-512 and without AMX the kernels take 0.4 to 0.6 of its time for 1 to 8 rows, as long
    for 64, and 1.1 times as long for 512 (two threads).
    """
    kernels = exact_kernels()
    is_faster = kernels is not None and kernels.name == "avx512-vnni" and not has_amx()
    return kernels if is_faster or int8_refusal() is not None else None


def _head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    found = None if find is None else find()
    return found if isinstance(found, nn.Module) else None


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | Conv1D)


def _can_replace(layer: nn.Module) -> bool:
    is_plain = type(layer) in (nn.Linear, Conv1D) and not is_hooked(layer)
    is_here = _weight(layer).device.type in ("cpu", "meta")
    return is_plain and is_here and _weight(layer).is_floating_point()


def _outputs(layer: nn.Module) -> int:
    return int(layer.nf if isinstance(layer, Conv1D) else layer.out_features)  # type: ignore[arg-type]


def _weight(layer: nn.Module) -> Tensor:
    """Return the weight [out, in]; GPT-2's layers keep it transposed."""
    assert isinstance(layer.weight, Tensor)
    return layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
