"""A tiny random model in float64 with its state, and its ordinary forward as the reference."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from modelpool.packed_attention import KVView
from modelpool.packed_model import PackedModel
from processors.sampler import Sampler, SamplingSettings
from statemgr import ModelState, StateManager
from tests.modelpool.factories import VOCAB_SIZE, save_llama

Ints = NDArray[np.int64]

GREEDY = SamplingSettings(temperature=0.0, top_k=0, top_p=1.0, seed=0)
WARM = SamplingSettings(temperature=0.9, top_k=40, top_p=0.95, seed=12)
MAX_TOKENS = 256


@functools.cache
def _models(seed: int) -> tuple[PackedModel, PreTrainedModel]:
    with tempfile.TemporaryDirectory() as directory:
        path = save_llama(Path(directory), seed=seed)
        packed, ordinary = (AutoModelForCausalLM.from_pretrained(path) for _ in range(2))
    return PackedModel.wrap("tiny", packed, VOCAB_SIZE), ordinary


class Bench:
    """Requests on one model. `settings` by row; prompts are random, of the given lengths."""

    def __init__(self, lengths: list[int], settings: SamplingSettings = GREEDY, seed: int = 0):
        self.model, self._ordinary = _models(seed)
        self.manager = StateManager(rows=6, max_tokens=MAX_TOKENS)
        self.state: ModelState = self.manager.open_state("tiny", self.model.kv_layers)
        self.sampler = Sampler(VOCAB_SIZE, window=32)
        self.settings = settings
        self.prompts = [
            np.random.default_rng(row).integers(1, VOCAB_SIZE, size=length).tolist()
            for row, length in enumerate(lengths)
        ]
        for prompt in self.prompts:
            row = self.manager.allocate(prompt, MAX_TOKENS)
            assert row is not None
            self.sampler.open(row, settings)

    def output_positions(self, rows: Ints) -> Ints:
        lengths = [len(self.prompts[row]) for row in rows.tolist()]
        positions: Ints = self.manager.counts[rows] - np.array(lengths)
        return positions

    def logits(self, tokens: list[int]) -> Tensor:
        """[T, V] of the ordinary forward."""
        with torch.inference_mode():
            logits: Tensor = self._ordinary(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits

    def continuation(self, row: int, count: int) -> list[int]:
        """What the model says after the committed tokens, an ordinary forward for each token."""
        tokens: list[int] = self.manager.committed(row).tolist()
        start = len(tokens)
        while len(tokens) < start + count:
            position = np.array([len(tokens) - len(self.prompts[row])])
            chosen = self.sampler.choose(self.logits(tokens)[-1:], np.array([row]), position)
            tokens.append(int(chosen))
        return tokens[start:]

    def snapshot(self) -> tuple[list[int], list[list[int]], list[list[int]]]:
        """What the state holds: ends, and tokens and positions of each row's valid slots."""
        rows = range(self.manager.rows)
        masks = [self.state.cache_mask[row] for row in rows]
        return (
            self.state.ends.tolist(),
            [self.state.cache_tokens[row, masks[row]].tolist() for row in rows],
            [self.state.positions[row, masks[row]].tolist() for row in rows],
        )


class FailingModel(PackedModel):
    """Fails in the given call of `forward`, after it wrote NaN into the slots of its pack."""

    def __init__(self, model: PackedModel, fails_at: int) -> None:
        super().__init__(
            model.name, model.model, model.vocab_size, model.max_positions, model.kv_layers
        )
        self._left = fails_at

    def forward(
        self, tokens: Tensor, positions: Tensor, view: KVView, logit_index: Tensor
    ) -> Tensor:
        self._left -= 1
        logits = super().forward(tokens, positions, view, logit_index)
        if self._left:
            return logits
        for number, layer in enumerate(self.kv_layers):
            shape = (len(tokens), layer.kv_heads, layer.head_dim)
            broken = torch.full(shape, float("nan"), dtype=layer.dtype)
            view.write(number, broken, broken)
        raise RuntimeError("out of memory")
