"""Products of few rows on a GPU: cuBLAS by the number of rows, and a product in Triton that is
measured, not shipped.

The Triton product takes the *weight* as the left side of each tile: `block_n` outputs by `block_k`
inputs, times a block of tokens. The inputs are split by the weight's shape alone, and the float32
sums of the splits are added up first to last. With blocks of 16 tokens a token's bits depend on its
own numbers only, however many others there are.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import cycle
from multiprocessing import get_context
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
BLOCK = 16  # tokens: the least of a product here
MOST = 4  # blocks of one program: what they add up is held in registers
REFERENCE = 128  # rows of the products that others are compared with
_CACHED = 2**27  # numbers of weights, more than a cache holds
_REPEATS = 15

WEIGHTS_7B = {  # outputs and inputs of Qwen2.5-7B
    "qkv": (4608, 3584),
    "out": (3584, 3584),
    "gate_up": (37888, 3584),
    "down": (3584, 18944),
    "head": (152064, 3584),
}
WEIGHTS_DRY = {"qkv": (256, 512), "out": (128, 256)}
ADDED_TO = ("out", "down")  # by `addmm_`, as the forward does


@dataclass(frozen=True, kw_only=True)
class Config:
    """`programs`: that a weight's tiles are split into, about; a constant, like all of it."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    programs: int

    def splits(self, outputs: int, inputs: int) -> tuple[int, int]:
        """How many, and the inputs of each: by the weight's shape alone."""
        blocks = inputs // self.block_k
        wanted = max(1, round(self.programs * self.block_n / outputs))
        chunk = -(-blocks // min(wanted, blocks))
        return -(-blocks // chunk), chunk * self.block_k


CONFIGS = (
    Config(block_n=128, block_k=128, warps=4, stages=3, programs=264),
    Config(block_n=128, block_k=64, warps=4, stages=6, programs=264),
    Config(block_n=64, block_k=128, warps=4, stages=4, programs=528),
    Config(block_n=128, block_k=128, warps=8, stages=4, programs=264),
    Config(block_n=128, block_k=64, warps=4, stages=4, programs=396),
    Config(block_n=64, block_k=256, warps=4, stages=3, programs=264),
    Config(block_n=128, block_k=128, warps=4, stages=4, programs=132),
)


def product(x: Tensor, weight: Tensor, config: Config, width: int = BLOCK) -> Tensor:
    """x [rows, inputs] times weight [outputs, inputs], transposed: [rows, outputs].

    `width`: tokens of one product of a tile; more than `BLOCK` is to be measured.
    """
    sums = partial_sums(x, weight, config, width)
    splits, outputs, tokens = sums.shape
    out = x.new_empty((len(x), outputs))
    columns = max(16, min(128, 2048 // tokens))
    with torch.cuda.device_of(x):
        add_splits[(triton.cdiv(outputs, columns),)](
            sums, out, len(x), outputs, splits, TOKENS=tokens, COLUMNS=columns
        )
    return out


def partial_sums(x: Tensor, weight: Tensor, config: Config, width: int = BLOCK) -> Tensor:
    """[splits, outputs, tokens] in float32; tokens are rows, up to the next power of two."""
    (rows, inputs), outputs = x.shape, len(weight)
    assert inputs % config.block_k == 0, "no tile of inputs is cut"
    assert outputs % config.block_n == 0, "no tile of outputs is cut"
    tokens = max(width, triton.next_power_of_2(rows))
    splits, chunk = config.splits(outputs, inputs)
    blocks = min(tokens // width, MOST)
    sums = x.new_empty((splits, outputs, tokens), dtype=torch.float32)
    with torch.cuda.device_of(x):
        multiply_tiles[(outputs // config.block_n, splits, tokens // (width * blocks))](
            weight, x, sums, rows, outputs, inputs, chunk, tokens,
            BLOCK_N=config.block_n, BLOCK_K=config.block_k, WIDTH=width, BLOCKS=blocks,
            # The interpreter multiplies the bit patterns of bfloat16 (triton#11584).
            IN_FLOAT32=not x.is_cuda, num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return sums


@triton.jit
def multiply_tiles(
    weight, x, sums, rows, outputs, inputs, chunk, tokens,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """One tile of outputs, one split of the inputs, up to four blocks of tokens."""
    tile, split, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    output, k, token = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, WIDTH)
    first = group * WIDTH * BLOCKS
    tiles = weight + (tile * BLOCK_N).to(tl.int64) * inputs
    found0 = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    found1, found2, found3 = found0, found0, found0
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, inputs), BLOCK_K):
        part = tl.load(
            tiles + (output[:, None] * inputs + (start + k)[None, :]),
            eviction_policy="evict_first",
        )
        found0 = _added(found0, part, x, first + token, start + k, rows, inputs, IN_FLOAT32)
        if BLOCKS > 1:
            own = first + WIDTH + token
            found1 = _added(found1, part, x, own, start + k, rows, inputs, IN_FLOAT32)
        if BLOCKS > 2:
            own = first + 2 * WIDTH + token
            found2 = _added(found2, part, x, own, start + k, rows, inputs, IN_FLOAT32)
            own = first + 3 * WIDTH + token
            found3 = _added(found3, part, x, own, start + k, rows, inputs, IN_FLOAT32)
    to = sums + (split * outputs + tile * BLOCK_N).to(tl.int64) * tokens + first
    place = output[:, None] * tokens + token[None, :]
    tl.store(to + place, found0)
    if BLOCKS > 1:
        tl.store(to + WIDTH + place, found1)
    if BLOCKS > 2:
        tl.store(to + 2 * WIDTH + place, found2)
        tl.store(to + 3 * WIDTH + place, found3)


@triton.jit
def _added(found, part, x, token, k, rows, inputs, IN_FLOAT32: tl.constexpr):
    """The sums with one block of tokens times a tile of the weight; missing tokens are zeros."""
    there = token < rows
    own = tl.load(x + (token[None, :] * inputs + k[:, None]), there[None, :], 0.0)
    if IN_FLOAT32:
        part, own = part.to(tl.float32), own.to(tl.float32)
    return tl.dot(part, own, found, input_precision="ieee")


@triton.jit
def add_splits(
    sums, out, rows, outputs, splits, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The sums of all splits, first to last, rounded once."""
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    known = output < outputs
    place = output[:, None] * TOKENS + token[None, :]
    total = tl.load(sums + place, known[:, None], 0.0)
    for split in range(1, splits):
        total += tl.load(sums + split * outputs * TOKENS + place, known[:, None], 0.0)
    there = known[:, None] & (token < rows)[None, :]
    tl.store(out + (token[None, :] * outputs + output[:, None]), total.to(out.dtype.element_ty),
             there)  # fmt: skip


def graph_ms(run: Callable[[], object], calls: int = 20) -> float:
    """Of one of several calls inside one CUDA graph; on a CPU, of one call."""
    if not ON_GPU:
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    found = list[float]()
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / calls)
    return statistics.median(found[2:])


def copies(outputs: int, inputs: int) -> Tensor:
    """[n, outputs, inputs] random weights, together more than a cache holds."""
    count = max(1, _CACHED // (outputs * inputs)) if ON_GPU else 1
    weights = torch.empty(count, outputs, inputs, device=DEVICE, dtype=DTYPE)
    return weights.normal_(std=0.02)


@torch.inference_mode()
def library_rows(part: str, weights: Tensor, counts: Sequence[int]) -> list[dict[str, Any]]:
    """cuBLAS by the number of rows: are a row's bits those that it has among `REFERENCE`, and the
    time inside a graph."""
    x = torch.randn(max(counts), weights.shape[2], device=DEVICE, dtype=DTYPE)
    start = torch.randn(max(counts), weights.shape[1], device=DEVICE, dtype=DTYPE)
    is_added = part in ADDED_TO

    def times(rows: Tensor, own: Tensor, weight: Tensor) -> Tensor:
        return own.addmm_(rows, weight.t()) if is_added else F.linear(rows, weight)

    whole = -(-len(x) // REFERENCE) * REFERENCE
    x, start = (F.pad(one, (0, 0, 0, whole - len(one))) for one in (x, start))
    pieces = zip(x.split(REFERENCE), start.split(REFERENCE), strict=True)
    wanted = torch.cat([times(one, own.clone(), weights[0]) for one, own in pieces])
    found = []
    for count in counts:
        got = times(x[:count], start[:count].clone(), weights[0])
        turns, own = cycle(weights), start[:count].clone()
        calls = 20 if weights[0].numel() < _CACHED else 4
        ms = graph_ms(lambda: times(x[:count], own, next(turns)), calls)  # noqa: B023
        same = torch.equal(got, wanted[:count])
        found.append({"rows": count, "same bits": same, "ms": round(ms, 5)})
    return found


@torch.inference_mode()
def triton_rows(weights: Tensor, config: Config) -> dict[str, Any]:
    """The Triton product: bits of 1 to 64 rows, its error, and times inside a graph."""
    most = BLOCK * MOST
    x = torch.randn(most, weights.shape[2], device=DEVICE, dtype=DTYPE)
    weight = weights[0]
    wanted = product(x, weight, config)
    counts = range(1, most + 1) if ON_GPU else (1, 3, 17)
    others = [n for n in counts if not torch.equal(product(x[:n], weight, config), wanted[:n])]
    few = weight[:4096]
    exact = x.double() @ few.double().t()
    error = (wanted[:, : len(few)].double() - exact).norm() / exact.norm()
    splits, chunk = config.splits(*weight.shape)
    found: dict[str, Any] = {
        "splits": splits, "inputs of a split": chunk,
        "rows with other bits": others, "error": round(error.item(), 6),
    }  # fmt: skip
    for width in (32, 64):
        rows = x[:width]
        wide = product(rows, weight, config, width)
        found[f"same bits {width} wide"] = torch.equal(wide, wanted[:width])
        if ON_GPU:
            turns = cycle(weights)
            ms = graph_ms(lambda: product(rows, next(turns), config, width), _calls(weight))  # noqa: B023
            found[f"ms {width} rows, {width} wide"] = round(ms, 5)
    for count in (1, BLOCK, 32, most):
        rows, turns = x[:count], cycle(weights)
        ms = graph_ms(lambda: product(rows, next(turns), config), _calls(weight))  # noqa: B023
        found[f"ms {count} rows"] = round(ms, 5)
    rows, turns = x[:BLOCK], cycle(weights)
    ms = graph_ms(lambda: partial_sums(rows, next(turns), config), _calls(weight))
    found[f"ms {BLOCK} rows, sums not added"] = round(ms, 5)
    found["GB/s"] = round(weight.nbytes / found[f"ms {BLOCK} rows"] / 1e6)
    return found


def _calls(weight: Tensor) -> int:
    return 20 if weight.numel() < _CACHED else 4


def compile_all(configs: Sequence[Config], processes: int = 8) -> float:
    """Fills Triton's cache on the disk, by several processes; the seconds that it took."""
    started = time.perf_counter()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, configs))
    return time.perf_counter() - started


@torch.inference_mode()
def compile_one(config: Config) -> None:
    weight = torch.ones(512, 1024, device=DEVICE, dtype=DTYPE)
    x = torch.ones(64, 1024, device=DEVICE, dtype=DTYPE)
    narrow = [(rows, BLOCK) for rows in (1, 16, 3, 32, 17, 64, 33)]
    with suppress(Exception):  # one that does not fit is told when it is measured
        for rows, width in (*narrow, (32, 32), (64, 64)):
            product(x[:rows], weight, config, width)


def measure(is_dry: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The library with each weight, then one configuration after the other with all of them."""
    shapes = WEIGHTS_DRY if is_dry else WEIGHTS_7B
    counts = (1, 4, 64, 128, 256) if is_dry else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    weights = {part: copies(*shape) for part, shape in shapes.items()}
    for part, own in weights.items():
        yield part, {"library": library_rows(part, own, counts)}
    configs = CONFIGS[:2] if is_dry else CONFIGS
    if ON_GPU:
        yield "compiling", {"s": round(compile_all(configs), 1)}
    tried: dict[str, list[dict[str, Any]]] = {part: [] for part in weights}
    for config in configs:
        for part, own in weights.items():
            try:
                found = triton_rows(own, config)
            except Exception as error:  # a configuration that does not fit: the others may
                found = {"failed": f"{type(error).__name__}: {error}"[:300]}
            tried[part].append({**asdict(config), **found})
            yield part, {"triton": list(tried[part])}
