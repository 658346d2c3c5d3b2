"""Models whose forward fails now and then, and a scheduler that cannot make up its mind.

A failure comes before the forward, after it (keys and values are written by then), or after the
first layer's keys and values were written as NaN, which attention must never see. Or nothing is
raised: the logits are NaN.
"""

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from modelpool.attention.kv_view import KVView
from modelpool.forward import ForwardOutput
from modelpool.packed_model import PackedModel
from processors import NgramDraftProcessor, TokenTree
from specrouter.cycle import Candidates, DraftShape, TreeSelector
from specrouter.request.params import MAX_DEPTH, MAX_TREE_TOKENS
from specrouter.routing.scheduler import ModelChainScheduler
from specrouter.slo.tree_planner import TreePlanner
from specrouter.slo.tree_selection import Bools, Ints
from specrouter.view import ChainDecision
from test_support.function_faults import InjectedFault

_KINDS = ("before", "after", "poison", "nan", "nan row", "memory")


class FaultInjection:
    """Which forwards fail. `rates` is by model name, and may change at any time."""

    def __init__(self, seed: int) -> None:
        self.rates: dict[str, float] = {}
        self.raised: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Patches the class, so that a model that is evicted and loaded again fails too."""
        original = PackedModel._forward

        def forward(
            model: PackedModel, tokens: Tensor, positions: Tensor, view: KVView, *rest: Any
        ) -> ForwardOutput:
            kind = self._draw(model.name)
            if kind == "before":
                raise InjectedFault(f"{model.name} fails before its forward")
            if kind == "memory":
                raise torch.OutOfMemoryError(f"{model.name} has no memory left")
            if kind == "poison":
                _write_nan(model, tokens.numel(), view)
                raise InjectedFault(f"{model.name} fails in its first layer")
            output = original(model, tokens, positions, view, *rest)
            logits = output.logits
            if kind == "after":
                raise InjectedFault(f"{model.name} fails after its forward")
            if kind == "nan":
                return dataclasses.replace(output, logits=torch.full_like(logits, torch.nan))
            if kind == "nan row" and len(logits):
                logits = logits.clone()
                logits[int(self._rng.integers(len(logits)))] = torch.nan
            return dataclasses.replace(output, logits=logits)

        look_up = NgramDraftProcessor.draft

        def draft(processor: NgramDraftProcessor, *arguments: Any) -> TokenTree:
            if self._draw("ngram") is not None:
                raise InjectedFault("the n-gram drafter fails")
            return look_up(processor, *arguments)

        with (
            mock.patch.object(PackedModel, "_forward", forward),
            mock.patch.object(NgramDraftProcessor, "draft", draft),
        ):
            yield

    def _draw(self, name: str) -> str | None:
        with self._lock:
            if self._rng.random() >= self.rates.get(name, 0.0):
                return None
            kind = str(self._rng.choice(_KINDS))
            self.raised[name] += 1
            self.kinds[kind] += 1
            return kind


@contextlib.contextmanager
def restless_scheduler(seed: int) -> Iterator[None]:
    """Every second decision is another chain and tree: models sit out, lag and catch up.

    Such trees keep their shape, whatever a cycle has to do, and of every second cycle's trees
    parts of random sizes are verified, where there is a selection at all.
    """
    rng = np.random.default_rng(seed)
    with _restless_choices(rng), _restless_selections(np.random.default_rng([seed, 1])):
        yield


@contextlib.contextmanager
def _restless_choices(rng: np.random.Generator) -> Iterator[None]:
    original = ModelChainScheduler.choose

    def choose(scheduler: ModelChainScheduler, *arguments: Any, **named: Any) -> ChainDecision:
        decision = original(scheduler, *arguments, **named)
        candidates = sorted(decision.predicted_ms)
        if not candidates or rng.random() < 0.5:
            return decision
        chain = candidates[int(rng.integers(len(candidates)))]
        width = int(rng.integers(1, 5))
        depth = int(rng.integers(1, min(MAX_DEPTH, MAX_TREE_TOKENS // width) + 1))
        nodes = 0 if rng.random() < 0.5 else int(rng.integers(1, depth * width + 1))
        shape = DraftShape(depth, width, nodes)
        # Without grids, by which a cycle would have other trees.
        found = dataclasses.replace(decision, chain=chain, shape=shape, grids={})
        if decision.predicted is None:
            return found
        # The planner goes by the prediction where there is one.
        predicted = dataclasses.replace(
            decision.predicted,
            chain=chain,
            shape=shape,
            cycle_ms=1e-3,  # so that it pays to catch up
        )
        return dataclasses.replace(found, predicted=predicted)

    with mock.patch.object(ModelChainScheduler, "choose", choose):
        yield


@contextlib.contextmanager
def _restless_selections(rng: np.random.Generator) -> Iterator[None]:
    original = TreePlanner.selector

    def pick(rows: Ints, candidates: Candidates, aside: int) -> Bools:
        return candidates.best(rng.integers(0, candidates.counts + 1))

    def selector(planner: TreePlanner, *arguments: Any) -> TreeSelector:
        found = original(planner, *arguments)
        return found if rng.random() < 0.5 else pick

    with mock.patch.object(TreePlanner, "selector", selector):
        yield


def _write_nan(model: PackedModel, tokens: int, view: KVView) -> None:
    number, layer = next(iter(model.kv_layers.items()))
    poison = torch.tensor(torch.nan, dtype=layer.dtype, device=layer.device)
    key, value = (
        poison.expand(tokens, layer.kv_heads, width) for width in (layer.head_dim, layer.value_dim)
    )
    view.write(number, key, value)
