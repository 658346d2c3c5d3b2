"""GraphRunner: a forward as CUDA graphs, one for each size of pack, over inputs that stay in place.

Contract: a pack is filled up to the next size with copies of its last token, which compute and
write what that writes: no row is kept for padding. What a graph was captured for are tokens, width
of the tree's paths and length of the longest row, each up to the next size, and the arenas: when
these are others, all graphs go. Packs with many tokens and few logits (prompts), and larger ones
than the largest size, run eagerly; so does everything once a capture has failed, with one warning.

`GraphMaker` is CUDA's, or a stand-in for tests. Never run on a GPU.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from modelpool.fast.layer_reference import Arena, PackInputs

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens
_KEYS = 256  # of the shortest row that graphs tell apart; longer ones by powers of two
_WARM_UPS = 2  # kernels compile, and libraries take their workspaces, before a capture

Compute = Callable[[PackInputs, list[Arena]], Tensor]


class GraphMaker(Protocol):
    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What replays `run`, and where its result then stands.

        Raises `RuntimeError` where it cannot be captured.
        """


@dataclass(frozen=True, eq=False)
class StaticPaths:
    """See `modelpool.attention.path.KeyPaths`."""

    firsts: Tensor
    positions: Tensor
    tails: Tensor
    path: Tensor
    longest: int


@dataclass(frozen=True)
class _Size:
    """What a graph is captured for."""

    tokens: int
    path: int
    longest: int


@dataclass(frozen=True, eq=False)
class _Captured:
    inputs: PackInputs
    replay: Callable[[], None]
    logits: Tensor  # [T, vocab_size]


class GraphRunner:
    def __init__(self, compute: Compute, graphs: GraphMaker) -> None:
        """`compute`: depends on nothing on the host but the shapes of what it is given."""
        self._compute = compute
        self._graphs = graphs
        self._captured: dict[_Size, _Captured] = {}
        self._arenas: tuple[int, ...] = ()
        self._can_capture = True

    def __call__(self, inputs: PackInputs, arenas: list[Arena]) -> Tensor:
        """[n, vocab_size] logits, of memory of their own."""
        size = size_of(inputs)
        if size is None or not self._can_capture:
            return self._compute(inputs, arenas)
        where = tuple(keys.data_ptr() for keys, _ in arenas)
        if where != self._arenas:
            self._captured.clear()
            self._arenas = where
        filled = padded(inputs, size)
        if size not in self._captured and not self._capture(size, filled, arenas):
            return self._compute(inputs, arenas)
        captured = self._captured[size]
        for there, here in zip(_tensors(captured.inputs), _tensors(filled), strict=True):
            there.copy_(here, non_blocking=True)
        captured.replay()
        return captured.logits[: len(inputs.logit_index)].clone()

    def _capture(self, size: _Size, filled: PackInputs, arenas: list[Arena]) -> bool:
        def run() -> Tensor:
            return self._compute(filled, arenas)

        try:
            for _ in range(_WARM_UPS):
                run()
            self._captured[size] = _Captured(filled, *self._graphs.capture(run))
        except RuntimeError as error:  # of CUDA
            logger.warning("no CUDA graphs, forwards run eagerly: %s", error)
            self._can_capture = False
            self._captured.clear()
        return self._can_capture


class CudaGraphs:
    """Implements `GraphMaker`: all graphs of a model share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Another thread may work on another device meanwhile: what it allocates is no part of this.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result


def size_of(inputs: PackInputs) -> _Size | None:
    """What its graph is captured for; None: it has none."""
    tokens, path = len(inputs.tokens), inputs.paths.path.shape[1]
    if not 0 < tokens <= SIZES[-1] or 2 * len(inputs.logit_index) < tokens:
        return None
    longest = max(_KEYS, _power_of_two(inputs.paths.longest))
    return _Size(_next(SIZES, tokens), _power_of_two(path), longest)


def padded(inputs: PackInputs, size: _Size) -> PackInputs:
    """Copies of a pack's inputs, filled up to a size by repeating their last entries."""
    paths = inputs.paths
    path = F.pad(_filled(paths.path, size.tokens), (0, size.path - paths.path.shape[1]))
    parts = (paths.firsts, paths.positions, paths.tails)
    firsts, positions, tails = (_filled(part, size.tokens) for part in parts)
    return PackInputs(
        _filled(inputs.tokens, size.tokens),
        _filled(inputs.slots, size.tokens),
        StaticPaths(firsts, positions, tails, path, size.longest),
        _filled(inputs.logit_index, size.tokens),
    )


def _filled(values: Tensor, count: int) -> Tensor:
    """[n, ...] to [count, ...], of memory of its own."""
    last = values[-1:].expand(count - len(values), *values.shape[1:])
    return torch.cat((values, last))


def _tensors(inputs: PackInputs) -> tuple[Tensor, ...]:
    paths = inputs.paths
    places = (paths.firsts, paths.positions, paths.tails, paths.path)
    return inputs.tokens, inputs.slots, inputs.logit_index, *places


def _next(sizes: Sequence[int], count: int) -> int:
    return sizes[bisect_left(sizes, count)]


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
