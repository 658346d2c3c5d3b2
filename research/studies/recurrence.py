"""What the recurrence of a hybrid model costs in a whole pass, commit included.

`python -m research.studies.recurrence`: passes of one token, of a tree of 16 nodes, and of a prompt
of 512 tokens through the shapes of Qwen3.5-0.8B, in turn with the same passes whose recurrent
states are neither read nor moved.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from modelpool.fast.tuning import Tuning
from modelpool.mixers.matrix_state import DeltaRule
from modelpool.packed_model import PackedModel
from modelpool.recurrent import Tensors
from statemgr import ModelState, TokenOrder

# Parents of a tree of 16 nodes, a chain of 5 with branches, and the path that is accepted.
_TREE = (-1, 0, 0, 1, 1, 3, 3, 2, 5, 5, 4, 8, 8, 7, 6, 9)
_ACCEPTED = {1: (0,), 16: (0, 1, 3)}


def model_of_published_shapes(layers: int) -> PackedModel:
    """Qwen3.5-0.8B, random, in bfloat16; a quarter of its layers attend."""
    config = Qwen3_5TextConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        vocab_size=248320,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: Any = Qwen3_5ForCausalLM(config)
    model.to(torch.bfloat16).requires_grad_(False)
    return PackedModel.wrap("qwen3.5", model, config.vocab_size, Tuning(pack_weights=True))


class Passes:
    """Of one row, each after the accepted tokens of the one before."""

    def __init__(self, model: PackedModel, count: int) -> None:
        self._model, self._count = model, count
        self._state = ModelState(model.kv_layers, 1, 2048, recurrent=model.recurrent_layers)
        self._row, self._length = np.array([0]), 0

    def run_ms(self) -> float:
        count, length = self._count, self._length
        parents = np.array(_TREE) if count == 16 else np.arange(-1, count - 1)
        depths: list[int] = []
        for parent in parents.tolist():
            depths.append(0 if parent < 0 else depths[parent] + 1)
        positions = length + np.array(depths)
        ids = torch.arange(count) * 7919 % self._model.vocab_size
        started = time.perf_counter()
        slots = self._state.append(self._row, np.array([count]), positions, positions)
        certain = np.array([count if count > 16 else 0])
        before = np.where(parents < 0, -1, slots[np.maximum(parents, 0)])
        order = TokenOrder(certain, before)
        view = self._state.view(self._row, np.array([count]), positions, slots, order=order)
        wanted = torch.arange(count if count <= 16 else 1)
        self._model.forward(ids, torch.from_numpy(positions), view, wanted)
        accepted = slots[list(_ACCEPTED.get(count, ()))]
        if count <= 16:
            self._state.commit(self._row, np.array([length]), accepted)
            self._length += len(accepted)
        else:
            self._state.rollback(self._row, np.array([0]))
            self._state.free(0)
        return (time.perf_counter() - started) * 1000


@contextmanager
def without_recurrence() -> Iterator[None]:
    def read(self: Any, state: Tensors, token: Tensors) -> tuple[Tensor, Tensors]:
        asking, value, decay, *_ = token
        return value, (asking[:, 0], value, decay)

    left_out: Any = {
        "read": read,
        "scan": lambda self, state, tokens: tokens[1],
        "advance": lambda self, state, entry: None,
    }
    with patch.multiple(DeltaRule, **left_out):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    model = model_of_published_shapes(options.layers)
    with torch.inference_mode():
        for count in (1, 16, 512):
            passes = Passes(model, count), Passes(model, count)
            ratios, whole = [], []
            for each in range(options.rounds + 1):
                with_ms = passes[0].run_ms()
                with without_recurrence():
                    without_ms = passes[1].run_ms()
                if each:  # the first one makes kernels
                    ratios.append(with_ms / without_ms)
                    whole.append(with_ms)
            print(f"{count} tokens: {median(whole):.1f} ms, {median(ratios):.2f} of it without")


if __name__ == "__main__":
    main()
