"""What a GPU should answer first: bits and times of matrix products and of whole forwards.

    python -m checks.gpu.measure gemm forward [--dry]

Prints Markdown tables, for research/LOG.md, and one JSON document as the last line. `--dry`:
tiny shapes, on a CPU if need be, to see that it runs.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen2Config

from modelpool.fast.cuda_forward import CudaForward
from modelpool.fast.graph_runner import CudaGraphs
from modelpool.packed_model import PackedModel
from statemgr import ModelState
from test_support.llama_models import reference_kernels

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
REPEATS = 30
ROWS = 128  # of `CudaForward`'s products
CACHED = 2**27  # numbers of weights, more than a cache holds


@dataclass(frozen=True, kw_only=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int


SHAPES = {
    "Qwen2.5-0.5B": Shape(hidden=896, layers=24, heads=14, kv_heads=2, mlp=4864, vocab=151936),
    "Qwen2.5-7B": Shape(hidden=3584, layers=28, heads=28, kv_heads=4, mlp=18944, vocab=152064),
}
TINY = {"tiny": Shape(hidden=64, layers=2, heads=4, kv_heads=2, mlp=96, vocab=512)}


def median_ms(run: Callable[[], object]) -> float:
    found = []
    for _ in range(REPEATS + 3):
        started = time.perf_counter()
        run()
        if ON_GPU:
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - started))
    return statistics.median(found[3:])


def gemm(shapes: dict[str, Shape], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Products of `ROWS` rows: are a row's bits the same in each place, how many others have them
    too, and what they take."""
    rows = []
    for name, shape in shapes.items():
        dim = shape.hidden // shape.heads
        sizes = {
            "qkv": ((shape.heads + 2 * shape.kv_heads) * dim, shape.hidden),
            "out": (shape.hidden, shape.heads * dim),
            "gate_up": (2 * shape.mlp, shape.hidden),
            "down": (shape.hidden, shape.mlp),
            "head": (shape.vocab, shape.hidden),
        }
        for part, (outputs, inputs) in sizes.items():
            weights = cycle(copies(outputs, inputs))
            weight = next(weights)
            x = torch.randn(max(*tokens, ROWS), inputs, device=DEVICE, dtype=DTYPE)
            wanted, order = F.linear(x[:ROWS], weight), torch.randperm(ROWS, device=DEVICE)
            moved = torch.equal(F.linear(x[:ROWS][order], weight), wanted[order])
            first = {m: F.linear(x[:m], weight)[:ROWS] for m in tokens}
            alike = [m for m, one in first.items() if torch.equal(one, wanted[: len(one)])]
            took = {m: _product_ms(x[:m], weights) for m in tokens}  # what no cache holds
            row = {"model": name, "part": part, "same in each place": moved, "as many": alike}
            rows.append({**row, "ms": took})
    return rows


def _product_ms(x: Tensor, weights: Iterator[Tensor]) -> float:
    return round(graph_ms(lambda: F.linear(x, next(weights))), 5)


def copies(outputs: int, inputs: int) -> Tensor:
    """[n, outputs, inputs] random weights, together more than a cache holds."""
    count = max(1, CACHED // (outputs * inputs)) if ON_GPU else 1
    weights = torch.empty(count, outputs, inputs, device=DEVICE, dtype=DTYPE)
    return weights.normal_(std=0.02)


def graph_ms(run: Callable[[], object], calls: int = 20) -> float:
    """Of one of several calls inside one CUDA graph: launches would overstate small ones. On a CPU,
    of one call."""
    if not ON_GPU:
        return median_ms(run)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return median_ms(graph.replay) / calls


def forward(shapes: dict[str, Shape], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """A random model's forward over one row after 512 tokens: eagerly, and as a graph."""
    rows = []
    for name, shape in shapes.items():
        packed, eager, graphed = _forwards(shape)
        for count in tokens:
            pack = _pack(packed, count)
            row: dict[str, Any] = {"model": name, "tokens": count}
            for kind, run in (("eager ms", eager), ("graph ms", graphed)):
                if run is not None:
                    row[kind] = round(median_ms(partial(run, *pack)), 3)
            rows.append(row)
        del packed, eager, graphed
    return rows


def _forwards(shape: Shape) -> tuple[PackedModel, CudaForward, CudaForward | None]:
    config = Qwen2Config(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, vocab_size=shape.vocab,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp, max_position_embeddings=2048, pad_token_id=None,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    factory: Any = AutoModelForCausalLM
    with torch.inference_mode(False), torch.device(DEVICE):
        model = factory.from_config(config, dtype=DTYPE).eval().requires_grad_(False)
    packed = PackedModel.wrap("random", model, shape.vocab)
    if not ON_GPU:
        return packed, CudaForward(packed, reference_kernels()), None
    from modelpool.fast.layer_kernels import triton_kernels

    kernels = triton_kernels()
    return (
        packed,
        CudaForward(packed, kernels),
        CudaForward(packed, kernels, CudaGraphs(packed.device)),
    )


def _pack(packed: PackedModel, count: int) -> tuple[Tensor, Tensor, Any, Tensor]:
    before, row = 512, np.array([0])
    state = ModelState(packed.kv_layers, 1, 1024 + count)
    past = np.arange(before)
    state.append(row, np.array([before]), past, past)
    positions = before + np.arange(count)
    slots = state.append(row, np.array([count]), positions, positions)
    view = state.view(row, np.array([count]), positions, slots)
    tokens = torch.arange(count, device=DEVICE)
    return tokens, torch.from_numpy(positions).to(DEVICE), view, tokens


def _table(rows: Sequence[dict[str, Any]]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names)] + [[str(row[name]) for name in names] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@torch.inference_mode()
def main(arguments: Sequence[str]) -> None:
    shapes, stages = TINY if "--dry" in arguments else SHAPES, {"gemm": gemm, "forward": forward}
    tokens = {"gemm": (1, 16, 128, 256, 512, 1024, 2048), "forward": (1, 4, 16, 64, 128, 256)}
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
    }
    for stage in [one for one in arguments if one in stages]:
        found[stage] = stages[stage](shapes, tokens[stage])
        print(f"\n{stage} on {found['device']}, torch {found['torch']}\n\n{_table(found[stage])}")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
