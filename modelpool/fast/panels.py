"""Linear layers whose weights are in 4 or 8 bits, for the CPU.

Contract: a row has the same bits for any kernel, any rows beside it, and any number of threads
(`modelpool/kernels/linear.c`). Without kernels, or if they compute something else, weights are
rounded to int8 (`Int8Weight`).
"""

import ctypes
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.checkpoint.block_values import BYTES_ZERO, GROUP, BlockValues
from modelpool.checkpoint.int4_values import in_4_bits
from modelpool.checkpoint.int8_values import INT8_LEVELS, Int8Values
from modelpool.fast.cpu import cpu_threads, int8_refusal
from modelpool.fast.int8 import quantise_rows, rounded_to_levels
from modelpool.kernels.library import LayerWeight, LinearKernels, linear_kernels

logger = logging.getLogger(__name__)

_PANEL = 32  # outputs
_ALIGNED = 64  # bytes of memory, and inputs of a layer
_HUGE, _CHUNK = 2**21, 2**25  # bytes of a large page, and of a chunk of weights
_MADV_HUGEPAGE = 14  # of Linux


class PanelWeight:
    """Weights of one layer, or of several side by side, in the kernels' panels of 32 outputs."""

    def __init__(
        self,
        given: int,
        units: Tensor,
        bias: Tensor | None,
        kernels: LinearKernels,
        form: Mapping[str, int],
        packed: Mapping[str, Tensor],
    ) -> None:
        """Describe the weights to the library.

        Args:
            given: number of inputs.
            units: [out] float32, the value of one level.
            bias: [out].
            kernels: the library's kernels.
            form: facts of the whole weight, by their names in the library.
            packed: contents of full panels, by their names in the library, in `_memory`.
        """
        self.in_features, self.out_features = given, len(units)
        self._kernels, self.others = kernels, list[PanelWeight]()
        outputs = -len(units) % _PANEL  # missing in the last panel
        parts = dict(packed)
        parts["units"] = F.pad(units / INT8_LEVELS, (0, outputs))
        if bias is not None:
            parts["bias"] = F.pad(bias.detach().float(), (0, outputs))
        self._parts = parts  # the kernels read their memory
        pointers = {name: each.data_ptr() for name, each in parts.items()}
        sizes = {"inputs": given + _missing(given), "given": given, "outputs": len(units)}
        self.described = LayerWeight(**pointers, **sizes, **form)  # for the library

    def rows(self, ids: Tensor) -> Tensor:
        """Map ids [n], int64 below `out_features`, to weights of these outputs [n, in] float32."""
        ids, y = ids.contiguous(), torch.empty(len(ids), self.in_features)
        self._kernels.library.sr_rows(
            ctypes.byref(self.described), ids.data_ptr(), len(ids), y.data_ptr()
        )
        return y

    def followed_by(self, others: "Sequence[PanelWeight]") -> "PanelWeight":
        """Append the outputs of `others`, which have the same inputs, and return itself."""
        for one, after in pairwise((self, *others)):
            one.described.next = ctypes.addressof(after.described)
            self.out_features += after.out_features
            self.others.append(after)
        return self

    def multiply(
        self, x: Tensor, dtype: torch.dtype | None = None, kernel: str | None = None
    ) -> Tensor:
        """Map [..., in] to [..., out], for any leading shape.

        `dtype` is by default that of `x`; `kernel` is the name of one of the library's.
        """
        shape, wanted = (*x.shape[:-1], self.out_features), dtype or x.dtype
        if not x.numel():
            return x.new_empty(shape, dtype=wanted)
        rows = x.reshape(-1, self.in_features)
        if rows.dtype not in (torch.float32, torch.bfloat16):
            rows = rows.float()
        is_known = wanted in (torch.float32, torch.bfloat16)
        y = torch.empty(len(rows), self.out_features, dtype=wanted if is_known else torch.float32)
        self._kernels.multiply(self.described, rows.contiguous(), y, kernel)
        return y.to(wanted).view(shape)


class BlockWeight(PanelWeight):
    """Weights in blocks, as they are stored.

    Activations have a scale for each group of 32 inputs, whose sums are exact; groups are added in
    float32.
    """

    def __init__(self, values: BlockValues, bias: Tensor | None, kernels: LinearKernels) -> None:
        """Pack the blocks; `bias` is [out]."""
        outputs, given = values.numbers.shape
        more, missing = -outputs % _PANEL, _missing(given)
        groups = (given + missing) // GROUP
        sizes = {"scales": groups * values.parts, "centres": groups}
        sizes |= dict.fromkeys(("steps", "bases"), -(-groups // values.groups_of_block))
        packed = {
            name: _aligned(_by_panel(F.pad(one, (0, size - one.shape[1], 0, more))))
            for name, size in sizes.items()
            if (one := getattr(values, name)) is not None
        }
        super().__init__(
            given,
            torch.ones(outputs) if values.units is None else values.units,
            bias,
            kernels,
            {"block": values.groups_of_block, "parts": values.parts, "zero": values.zero},
            _packed(values.numbers, values.bits, kernels) | packed,
        )


class Int8PanelWeight(PanelWeight):
    """Weights of W8A8 checkpoints, with a scale for each row of activations.

    The kernels are also exact on CPUs where oneDNN is not.
    """

    def __init__(self, values: Int8Values, bias: Tensor | None, kernels: LinearKernels) -> None:
        """Pack the levels; `bias` is [out]."""
        numbers = values.levels.view(torch.uint8) ^ BYTES_ZERO
        super().__init__(
            numbers.shape[1],
            values.scales,
            bias,
            kernels,
            {"block": 1, "parts": 1, "zero": BYTES_ZERO, "is_by_row": 1},
            _packed(numbers, 8, kernels),
        )


def _missing(inputs: int) -> int:
    return -inputs % _ALIGNED


@cache
def exact_kernels() -> LinearKernels | None:
    """Return the kernels of this process; None if there are none with int8's bits."""
    found = linear_kernels()
    if found is None or is_exact(found):
        return found
    logger.warning("weights are rounded to int8: the kernel %s has other bits here", found.name)
    return None


def is_exact(kernels: LinearKernels) -> bool:
    """Return whether the kernel in use gives plain C's bits, and these are right.

    Both are tried with few rows and with many; plain C is compared with exact sums of integers.
    """
    with cpu_threads(1):  # as in `int8_refusal`: the calling thread must not get workers
        for weight, x, expected in _trials(kernels):
            plain = weight.multiply(x, kernel="plain")
            if not torch.allclose(plain, expected, rtol=1e-4, atol=1e-4 * float(expected.std())):
                return False
            if any(
                not torch.equal(weight.multiply(x[:rows]), plain[:rows]) for rows in (1, 19, 33)
            ):
                return False
    return True


def _trials(kernels: LinearKernels) -> Iterator[tuple[PanelWeight, Tensor, Tensor]]:
    """Yield weights, some rows, and the expected products."""
    draws = torch.Generator().manual_seed(0)
    values = Int8Values.of(torch.randn(70, 100, generator=draws))
    x = torch.randn(33, 100, generator=draws)
    levels, largest = quantise_rows(x)
    sums = (levels.long() - 128) @ values.levels.long().t()
    expected = sums.float() * (values.scales / INT8_LEVELS) * largest
    yield Int8PanelWeight(values, None, kernels), x, expected
    plain = torch.randn(70, 320, generator=draws)  # more groups than are unpacked at once
    x = torch.randn(33, 320, generator=draws)
    small = torch.randint(64, (70, 320), generator=draws, dtype=torch.uint8)
    scales = torch.randint(-128, 128, (70, 20), generator=draws, dtype=torch.int8)
    steps = torch.rand(70, 1, generator=draws).half()
    in_parts = BlockValues(numbers=small, bits=6, zero=32, steps=steps, scales=scales)
    of_5 = BlockValues(numbers=small & 31, bits=5, zero=16, steps=steps)
    for one in (in_4_bits(plain), BlockValues.rounded(plain), of_5, in_parts):
        yield BlockWeight(one, None, kernels), x, rounded_to_levels(x) @ one.plain().t()


def quantised_refusal() -> str | None:
    """Return why this CPU can serve neither int8 nor int4, or None if it can."""
    reason = int8_refusal()
    return None if reason is None or exact_kernels() is not None else reason


def _packed(numbers: Tensor, bits: int, kernels: LinearKernels) -> dict[str, Tensor]:
    """Pack [out, in] uint8 for the kernels, by their names (see `Weight` of linear.c)."""
    outputs, given = numbers.shape
    count = (outputs + -outputs % _PANEL) * (given + _missing(given))
    names = ("bytes",) if bits == 8 else ("nibbles", "fifths", "sixths")[: bits - 3]
    sizes = {"bytes": count, "nibbles": count // 2}
    found = {name: _memory(sizes.get(name, count // 8)) for name in names}
    kernels.pack(numbers.contiguous(), bits, list(found.values()))
    return found


def _by_panel(of_groups: Tensor) -> Tensor:
    """Rearrange [out, groups] to [panels, groups, 32]."""
    panels = of_groups.reshape(len(of_groups) // _PANEL, _PANEL, -1)
    return panels.transpose(1, 2).contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """Copy a tensor's bytes into `_memory`."""
    plain = tensor.view(torch.uint8).flatten()
    return _memory(len(plain)).copy_(plain)


class _Arena:
    """Memory for weights, in pages of 2 MB where Linux has them: fewer misses of the TLB.

    Weights share chunks, since most are smaller than a page; a chunk lives as long as one of them,
    and the last one until another is begun.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def take(self, size: int) -> Tensor:
        """Return `size` bytes from a multiple of `_ALIGNED` on, and as many that may be read."""
        whole = -(-size // _ALIGNED) * _ALIGNED + _ALIGNED
        with self._lock:
            if whole > _CHUNK // 2:
                return _huge_pages(whole)[:size]
            if self._used + whole > len(self._chunk):
                self._chunk, self._used = _huge_pages(_CHUNK), 0
            start, self._used = self._used, self._used + whole
            return self._chunk[start : start + size]


def _huge_pages(size: int) -> Tensor:
    """Return bytes from a multiple of 2 MB on, for which Linux is asked to use pages of 2 MB."""
    with torch.inference_mode(False):  # else no other mode could write to it
        memory = torch.empty(size + _HUGE, dtype=torch.uint8)
    start = -memory.data_ptr() % _HUGE
    if sys.platform == "linux":  # an error does no harm: pages are small then
        place = ctypes.c_void_p(memory.data_ptr() + start)
        ctypes.CDLL(None).madvise(place, ctypes.c_size_t(size), _MADV_HUGEPAGE)
    return memory[start : start + size]


_memory = _Arena().take
