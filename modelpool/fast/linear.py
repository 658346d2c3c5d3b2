"""Linear layers whose weights oneDNN lays out once, for bfloat16 and float32 on the CPU.

Contract: a row has the same bits beside any other rows. In bfloat16 they are those that
`F.linear` gives it among other rows; in float32, where `F.linear` is another library whose bits
depend on the number of rows, the last bits may differ from it.

oneDNN re-orders a plain bfloat16 weight at every call; without that a forward of 200M parameters
takes 0.65 of its time for 4 tokens and 0.87 for 64 (one thread, AVX-512). In float32 its products
take 0.37 of the time for 2 tokens, 0.36 for 4 and 0.6 for 16 (two threads, AVX2), but small layers
would lose 10 microseconds each. In some shapes oneDNN sums few rows in another order (a single row
beyond 1,024 inputs, torch 2.13, bfloat16, AVX-512; up to 15 rows of 160 inputs, torch 2.11,
float32): a text would depend on whether its request ran alone, so rows of zeros are added if a
trial shows that they are needed (`sum_order`). With AMX it sums more than 32 rows in other orders
beyond some 512 inputs, so rows are multiplied 32 at a time there: as fast up to 32, 1.6 times the
time for 64 rows and some 2.5 times for more (one thread), and still a fraction of the time without
AMX. Everything else stays as it was: other dtypes and devices, subclasses of `nn.Linear`, and
layers with hooks, such as those that `accelerate` has spread over devices.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.logging import tqdm

from modelpool.fast.cpu import computes_in, has_amx
from modelpool.fast.row_sizes import filled, row_size
from modelpool.fast.sum_order import least_rows, pack, product

_AMX_ROWS, _AMX_INPUTS = 32, 256  # within either limit AMX sums all rows in one order
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # read the same input
_LARGE = 2**17  # elements of a float32 weight from which on packing gains more than it costs


class PackedWeight:
    """The weight of one layer, or of several side by side, in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack `weight`, [out, in]; `bias` is [out]."""
        self.out_features, self.in_features = weight.shape
        self.bias, self.dtype = bias, weight.dtype
        self._packed = pack(weight)
        in_blocks = weight.dtype == torch.bfloat16 and self.in_features > _AMX_INPUTS
        self._most_rows = _AMX_ROWS if in_blocks and has_amx() else None

    def plain(self) -> Tensor:
        """Return a plain copy, [out, in]."""
        return self._packed.to_dense()

    def multiply(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out], for any leading shape."""
        count, least = x.numel() // self.in_features, self._least_rows()
        if 0 < count < least:
            rows = F.pad(x.reshape(count, -1), (0, 0, 0, least - count))
            return self._product(rows)[:count].view(*x.shape[:-1], self.out_features)
        most = self._most_rows
        if most is not None and x.numel() > most * self.in_features:
            rows = x.reshape(-1, self.in_features)
            starts = range(0, len(rows), most)
            y = torch.cat([self._product(rows[start : start + most]) for start in starts])
            return y.view(*x.shape[:-1], self.out_features)
        if row_size(count) != count:
            y = self._product(filled(x.reshape(-1, self.in_features)))[:count]
            return y.view(*x.shape[:-1], self.out_features)
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        return product(x, self._packed, self.bias)

    def _least_rows(self) -> int:
        threads = torch.get_num_threads()
        return least_rows(self.in_features, self.out_features, self.dtype, threads)


class PackedLinear(nn.Module):
    """An `nn.Linear` that keeps its weight only in oneDNN's layout.

    Its outputs are all those of a weight, or those from `start` on of one that it shares.
    """

    def __init__(self, plain: nn.Linear, is_tied: bool = False) -> None:
        """Pack the weight of `plain`; with `is_tied`, another module keeps the plain one."""
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.is_tied = is_tied
        self.hidden_parameters = 0 if is_tied else self.in_features * self.out_features
        self.bias = plain.bias
        # No buffer: an opaque tensor can be neither moved, cast, nor stored.
        self.shared, self._start = PackedWeight(plain.weight, plain.bias), 0

    def share(self, weight: PackedWeight, start: int) -> None:
        """Replace its own weight by one that has the same outputs from `start` on."""
        self.shared, self._start = weight, start

    @property
    def weight(self) -> Tensor:
        """A plain copy, [out_features, in_features], made at each access."""
        return self.shared.plain().narrow(0, self._start, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features], for any leading shape."""
        y = self.shared.multiply(x)
        if self.shared.out_features == self.out_features:
            return y
        return y.narrow(-1, self._start, self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedLinear":
        """Copy it by packing again, because torch cannot copy an opaque tensor."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta")
        plain.weight = nn.Parameter(self.weight, requires_grad=False)
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias.detach().clone(), requires_grad=False)
        copied = PackedLinear(plain, self.is_tied)
        copied.train(self.training)
        memo[id(self)] = copied
        return copied


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this torch and this CPU have what `PackedLinear` needs for `dtype`."""
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    has_operator = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and computes_in(str(dtype).removeprefix("torch."))


def gains(weight: Tensor) -> bool:
    """Return whether packing makes products with this weight faster, or their bits steadier."""
    return weight.device.type == "cpu" and gains_on_cpu(weight.numel(), weight.dtype)


def gains_on_cpu(elements: int, dtype: torch.dtype) -> bool:
    return (elements >= _LARGE or dtype == torch.bfloat16) and can_pack(dtype)


def pack_linears(model: nn.Module, every: bool = False) -> int:
    """Pack, in place, each layer of `model` that gains by it; return the number of layers.

    With `every`, all layers that can be packed are. The plain weight of a layer is freed before the
    next one is packed. An embedding that shares a layer's weight keeps it.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    packed: dict[nn.Module, PackedLinear] = {}  # one layer may be used in several places
    for parent in tqdm(list(model.modules()), disable=True):  # `counted_loops`
        for name, child in list(parent.named_children()):
            if child not in packed and isinstance(child, nn.Linear) and _is_packed(child, every):
                packed[child] = PackedLinear(child, is_tied=id(child.weight) in embeddings)
                child.register_parameter("weight", None)
            if child in packed:
                setattr(parent, name, packed[child])
    if packed:
        let_go_of_file(model.parameters())
    return len(packed)


def parameter_count(model: nn.Module) -> int:
    """Return the number of a model's parameters, packed ones included, shared ones once."""
    hidden = sum(int(getattr(module, "hidden_parameters", 0)) for module in model.modules())
    return hidden + sum(parameter.numel() for parameter in model.parameters())


def let_go_of_file(parameters: Iterable[nn.Parameter]) -> None:
    """Copy weights that stay plain: a single one keeps the whole checkpoint mapped."""
    for parameter in parameters:
        with torch.inference_mode(parameter.is_inference()):  # the copy is of the same kind
            parameter.data = parameter.data.clone()


def is_hooked(layer: nn.Module) -> bool:
    """Return whether a layer has forward hooks, of torch or of accelerate."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    return bool(hooks) or hasattr(layer, "_hf_hook")


def _is_packed(layer: nn.Linear, every: bool) -> bool:
    if type(layer) is not nn.Linear or is_hooked(layer):
        return False
    weight = layer.weight
    return gains(weight) or (every and weight.device.type == "cpu" and can_pack(weight.dtype))
