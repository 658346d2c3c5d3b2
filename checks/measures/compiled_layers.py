"""What quantised layers in the C library bring over torch's operators, on random models.

    python -m checks.measures.compiled_layers [--weights int8 int4] [--rounds 7] [--threads 1]

Models of 29M and 202M in bfloat16, both forwards in turn, seven passes of each in a round, in CPU
time, which other programs disturb less. Told are medians over rounds of the least times' ratio.
"""

import argparse
import time
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig

from checks.measures.passes import packed_of
from modelpool.fast import lean_forward
from modelpool.fast.lean_forward import lean_forward_of
from modelpool.forward import Forward
from modelpool.packed_model import PackedModel
from modelpool.probe import ProbeView

CONTEXT = 128
SIZES = ((512, 1408, 8), (1024, 2816, 16))  # hidden, of the MLP, layers


def forwards(hidden: int, inner: int, layers: int, weights: Any) -> tuple[PackedModel, Any, Any]:
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    packed = packed_of(config, torch.bfloat16, weights)
    own = lean_forward_of(packed)
    if own is None or own._compiled is None:
        raise SystemExit("no layer is compiled here: is there a C compiler, and a CPU with AVX2?")
    with patch.object(lean_forward, "compiled_layers", lambda *_: None):
        return packed, own, lean_forward_of(packed)


@torch.inference_mode()
def ratios(
    packed: PackedModel, own: Forward, plain: Forward, rows: int
) -> tuple[float, float, float]:
    """The least CPU time of `plain` over that of `own`, and over itself; that of `own` in ms."""
    view = ProbeView(packed.device, CONTEXT + rows, packed.kv_layers)
    times: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for start, stop in ((0, CONTEXT), *[(CONTEXT, CONTEXT + rows)] * 7):
        positions = torch.arange(start, stop)
        tokens, index = positions * 7919 % packed.vocab_size, positions - start
        for which, forward in enumerate((plain, own, plain)):
            view.begin(start, stop)
            began = time.process_time()
            forward(tokens, positions, view, index)
            times[which].append(time.process_time() - began)
    least = [min(each[1:]) for each in times.values()]
    return least[0] / least[1], least[0] / least[2], 1e3 * least[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weights", nargs="+", default=["int8", "int4"])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    for sizes in SIZES:
        for weights in given.weights:
            packed, own, plain = forwards(*sizes, weights)
            for rows in (1, 4, 16):
                found = [ratios(packed, own, plain, rows) for _ in range(given.rounds)]
                ratio, same, ms = (median(each) for each in zip(*found, strict=True))
                told = f"{weights}, hidden {sizes[0]}, {rows} rows: {ms:.2f} ms, {ratio:.3f}"
                print(f"{told} (A/A {same:.3f})", flush=True)


if __name__ == "__main__":
    main()
