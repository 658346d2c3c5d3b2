"""A tiny random model in float64 with its state, and its ordinary forward as the reference."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from modelpool.attention.kv_view import KVView
from modelpool.forward import ForwardOutput, HiddenLayers
from modelpool.packed_model import PackedModel
from processors.contexts import Contexts
from processors.pack import ActiveModel, PackPlan, run_pack
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings
from processors.token_tree import Ints, TokenTree
from statemgr import ModelState, StateManager
from test_support.factories import VOCAB_SIZE, save_llama

GREEDY = SamplingSettings(temperature=0.0, top_k=0, top_p=1.0, seed=0)
WARM = SamplingSettings(temperature=0.9, top_k=40, top_p=0.95, seed=12)
PENALIZED = SamplingSettings(
    temperature=0.8, seed=5, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.6
)
MAX_TOKENS = 256


@functools.cache
def _models(seed: int) -> tuple[PackedModel, PreTrainedModel, dict[tuple[int, ...], Tensor]]:
    """Packed and ordinary; and the logits that the ordinary one has after texts, as far as any test
    has asked."""
    with tempfile.TemporaryDirectory() as directory:
        path = save_llama(Path(directory), seed=seed)
        packed, ordinary = (AutoModelForCausalLM.from_pretrained(path) for _ in range(2))
    return PackedModel.wrap("tiny", packed, VOCAB_SIZE), ordinary, {}


class Bench:
    """Requests on one model. `settings` by row; prompts are random, of the given lengths."""

    def __init__(
        self,
        lengths: list[int],
        settings: SamplingSettings = GREEDY,
        seed: int = 0,
    ):
        self.model, self._ordinary, self._known = _models(seed)
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
            self.sampler.open(row, settings, prompt)

    @property
    def active(self) -> ActiveModel:
        return ActiveModel(self.model, self.state, self.manager)

    def output_positions(self, rows: Ints) -> Ints:
        lengths = [len(self.prompts[row]) for row in rows.tolist()]
        positions: Ints = self.manager.counts[rows] - np.array(lengths)
        return positions

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        self.manager.extend(row, np.array(tokens))
        self.sampler.extend(row, tokens)

    def feed(self, row: int, count: int) -> None:
        """Some of the committed tokens, alone."""
        plan = PackPlan(np.array([row]), np.array([count]), np.array([False]))
        nothing = TokenTree.empty(np.zeros(0, dtype=np.int64))
        run_pack(self.active, plan, nothing)

    def logits(self, tokens: list[int]) -> Tensor:
        """[T, V] of the ordinary forward."""
        with torch.inference_mode():
            logits: Tensor = self._ordinary(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits

    def hidden(self, tokens: list[int], layers: HiddenLayers) -> Tensor:
        """[T, layers, H] of the ordinary forward."""
        with torch.inference_mode():
            given = self._ordinary(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.stack([given[layer][0] for layer in layers], dim=1)

    def logits_after(self, row: int, path: Sequence[int] = ()) -> Tensor:
        """[V] of the ordinary forward over the committed tokens and a path behind them."""
        text = (*self.manager.committed(row).tolist(), *path)
        if text not in self._known:
            self._known[text] = self.logits(list(text))[-1].clone()  # without those before it
        return self._known[text]

    def says(self, row: int, path: Sequence[int] = ()) -> int:
        """What the model chooses there."""
        ids, _ = self.sampler.choose(self.logits_after(row, path)[None], self._place(row, path))
        return int(ids)

    def log_probs_after(self, row: int, path: Sequence[int] = ()) -> Tensor:
        """[V] log-softmax of the scores there."""
        scores = self.sampler.scores(self.logits_after(row, path)[None], self._place(row, path))
        return scores.log_softmax(dim=-1)[0]

    def continuation(self, row: int, count: int) -> list[int]:
        """What the model says after the committed tokens, an ordinary forward for each token."""
        path: list[int] = []
        for _ in range(count):
            path.append(self.says(row, path))
        return path

    def path_log_prob(self, row: int, path: Sequence[int]) -> float:
        steps = (float(self.log_probs_after(row, path[:k])[path[k]]) for k in range(len(path)))
        return sum(steps)

    def _place(self, row: int, path: Sequence[int]) -> Contexts:
        position = self.output_positions(np.array([row])) + len(path)
        text = torch.tensor([list(path)], dtype=torch.int64)
        return Contexts(
            rows=np.array([row]), positions=position, depths=np.array([len(path)]), paths=text
        )

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

    def forward(self, tokens: Tensor, positions: Tensor, view: KVView, *rest: Any) -> ForwardOutput:
        self._left -= 1
        output = super().forward(tokens, positions, view, *rest)
        if self._left:
            return output
        for number, layer in self.kv_layers.items():
            shape = (len(tokens), layer.kv_heads, layer.head_dim)
            broken = torch.full(shape, float("nan"), dtype=layer.dtype)
            view.write(number, broken, broken)
        raise RuntimeError("out of memory")


class SpeechlessModel(PackedModel):
    """Its logits are not numbers for the first token that they are asked for."""

    def __init__(self, model: PackedModel) -> None:
        super().__init__(
            model.name, model.model, model.vocab_size, model.max_positions, model.kv_layers
        )

    def forward(self, *pack: Any) -> ForwardOutput:
        output = super().forward(*pack)
        output.logits[0] = float("nan")
        return output
