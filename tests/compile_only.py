"""Kernels compiled for GPUs that are not here: registers, spilled bytes, shared memory.

    python -m tests.compile_only

Contract: a process of its own, without Triton's interpreter. Prints one JSON document, a list of
objects with `kernel`, `target`, `registers`, `spilled_bytes` and `shared_bytes`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TARGETS = {80: "sm_80", 90: "sm_90a"}
STRIDES = ("query_token", "query_head", "kv_slot", "kv_head", "logit_row")


@dataclass(frozen=True)
class Compiled:
    kernel: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def compiled(name: str, kernel: Any, types: Mapping[str, str], **constants: Any) -> list[Compiled]:
    """`types`: of what is no constant, as Triton writes them, such as "*fp32"."""
    return [_compiled(name, kernel, types, constants, target) for target in TARGETS]


def _compiled(
    name: str, kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], target: int
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place = kernel.arg_names.index
    types = {one: kind for one, kind in types.items() if one in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature={one: types.get(one, "constexpr") for one in kernel.arg_names},
        constexprs={(place(one),): value for one, value in constants.items()},
        # Addresses and strides are multiples of 16, as Triton finds them to be at a launch.
        attrs={
            (place(one),): [["tt.divisibility", 16]]
            for one, kind in types.items()
            if kind[0] == "*" or one in STRIDES
        },
    )
    built = triton.compile(source, target=GPUTarget("cuda", target, 32))
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(built.asm["ptx"])
        file.flush()
        options = ["-v", f"--gpu-name={TARGETS[target]}", "-o", os.devnull]
        command = [str(assembler), *options, file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return Compiled(name, TARGETS[target], registers, spilled, int(built.metadata.shared))


def path_attention() -> Iterator[Compiled]:
    import torch

    from modelpool.attention.path_kernels import SPLIT, block_of, joined_sums, partial_sums

    numbers = ("query_token", "query_head", "kv_slot", "kv_head", "path_token")
    sizes = (*numbers, "table_row", "splits")
    whole = dict.fromkeys(("rows", "positions", "tails", "path", "tables"), "*i32")
    sums = dict.fromkeys(("sums", "peaks", "totals"), "*fp32")
    shapes = (
        ("bf16", torch.bfloat16, 128, 7, 0, False),
        ("bf16", torch.bfloat16, 64, 7, 4096, True),
        ("fp16", torch.float16, 128, 1, 4096, False),
        ("fp32", torch.float32, 32, 3, 0, True),
        ("fp32", torch.float32, 128, 4, 0, False),
    )
    for name, dtype, dim, group, window, is_capped in shapes:
        inputs = dict.fromkeys(("query", "keys", "values"), f"*{name}")
        types = inputs | whole | sums | {"scale": "fp32", "softcap": "fp32"}
        yield from compiled(
            f"path attention {name} {dim}", partial_sums, types | dict.fromkeys(sizes, "i32"),
            HEADS=4 * group, GROUP=group, ROWS=16, DIM=dim, BLOCK=block_of(dim, dtype),
            SPLIT=SPLIT, WINDOW=window, IS_CAPPED=is_capped, BLOCK_SLOTS=32, IN_FLOAT32=False,
        )  # fmt: skip
    types = sums | {"sinks": "*bf16", "out": "*bf16", "positions": "*i32", "splits": "i32"}
    yield from compiled(
        "joined sums", joined_sums, types,
        HEADS=28, DIM=128, SPLIT=SPLIT, WINDOW=4096, HAS_SINKS=True,
    )  # fmt: skip


def choice() -> Iterator[Compiled]:
    from processors.choice_kernels import block_best, joined_best, scores_at

    inputs = {"numbers": "*i64", "temperatures": "*fp64"}
    sizes = dict.fromkeys(("logit_row", "count", "size", "blocks", "asked"), "i32")
    found = {"scores": "*fp64", "sums": "*fp64", "found": "*i32", "first_nan": "*i32"}
    last = {"best_scores": "*fp64", "best_ids": "*i64", "totals": "*fp64"}
    for kind, width in (("bf16", 1), ("fp32", 4), ("bf16", 8)):
        name = f"choice of {width}, {kind}"
        types = inputs | found | sizes | {"logits": f"*{kind}"}
        yield from compiled(name, block_best, types, WIDTH=width, ROWS=1, IDS=1024)
        shape = {"BLOCKS": 256, "CANDIDATES": 256 * width}
        yield from compiled(name, joined_best, found | last | sizes, WIDTH=width, ROWS=1, **shape)
    single = {"logits": "*bf16", "places": "*i64", "tokens": "*i64", "out": "*fp64"}
    yield from compiled("scores", scores_at, inputs | single | sizes, ASKED=128)


def layers() -> Iterator[Compiled]:
    from modelpool.fast.layer_kernels import gate_rows, rotate_heads

    heads = dict.fromkeys(("qkv", "rotations", "weight", "query", "keys", "values"), "*bf16")
    types = heads | {"positions": "*i32", "slots": "*i32", "eps": "fp32"}
    types |= dict.fromkeys(("kv_slot", "kv_head"), "i32")
    for has_norms in (False, True):
        shape = {"HEADS": 28, "KV_HEADS": 4, "DIM": 128, "HAS_NORMS": has_norms}
        yield from compiled("heads", rotate_heads, types, **shape)
    types = {"gate_up": "*bf16", "out": "*bf16", "size": "i32"}
    yield from compiled("gate", gate_rows, types, COLUMNS=1024)


def all_kernels() -> Iterator[Compiled]:
    yield from path_attention()
    yield from choice()
    yield from layers()


def compiled_elsewhere() -> list[Compiled]:
    """All kernels, compiled by a process of its own."""
    command = [sys.executable, "-m", "tests.compile_only"]
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return [Compiled(**one) for one in json.loads(ran.stdout)]


if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in all_kernels()], indent=1))
