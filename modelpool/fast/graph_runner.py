"""GraphRunner: a forward as CUDA graphs, one for each size of pack, with inputs at fixed addresses.

Contract: a pack is padded to the next size with copies of its last token, which compute and write
the same values: no row is reserved for padding. A graph is captured for a number of tokens, a width
of the tree's paths, a length of the longest row and a number of rows, each rounded up to the next
size, and for the hidden states that are requested and the arenas. A capture takes as long as some
dozens of passes: `prepare` makes those that most packs need before the first pack. Packs with many
tokens and few logits (prompts), and packs beyond the largest size, run eagerly; so does everything
after a capture has failed, with one warning. A pack's index arrays are padded on the host, and go
to the device in one copy (`modelpool.fast.pack_sender`).

`GraphMaker` is implemented by CUDA graphs, and by a stand-in in tests.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from modelpool.attention.path import NO_TAIL, PackPlaces
from modelpool.fast.layer_reference import Arena, PackInputs
from modelpool.fast.pack_layout import Pack, PackLayout, buffer_on
from modelpool.fast.pack_sender import PackSender
from modelpool.forward import ForwardOutput, HiddenLayers

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens
_KEYS = 1024  # smallest limit of row lengths; larger limits are powers of two
_PATH = 32  # smallest limit of path steps, likewise
_ROWS = 64  # rows that a graph has tables for; each larger number has its own graphs
_PREPARED = 256  # most tokens: each graph keeps its logits, and few cycles have more
_ARENAS = 2  # sets with kept graphs: a model is timed with one for many rows, one for long ones
_WARM_UPS = 2  # before a capture: kernels compile, and libraries allocate workspaces

Compute = Callable[[PackInputs, Sequence[Arena], HiddenLayers], ForwardOutput]


class GraphMaker(Protocol):
    def capture(self, run: Callable[[], ForwardOutput]) -> tuple[Callable[[], None], ForwardOutput]:
        """Return a function that replays `run`, and the memory of its result.

        Raises `RuntimeError` if it cannot be captured.
        """


@dataclass(frozen=True, kw_only=True)
class _Size:
    """The dimensions that a graph is captured for."""

    tokens: int
    path: int
    longest: int
    rows: int
    block_slots: int
    hidden: HiddenLayers

    @property
    def layout(self) -> PackLayout:
        return PackLayout(
            tokens=self.tokens,
            path=self.path,
            logits=self.tokens,
            rows=self.rows,
            blocks=-(-self.longest // self.block_slots),
            block_slots=self.block_slots,
        )


@dataclass(frozen=True, eq=False)
class _Captured:
    layout: PackLayout
    numbers: Tensor  # its input
    replay: Callable[[], None]
    output: ForwardOutput  # for all its T tokens, logits too


class GraphRunner:
    def __init__(
        self, compute: Compute, sender: PackSender, graphs: GraphMaker | None = None
    ) -> None:
        """Run `compute` in graphs, or eagerly without `graphs`.

        `compute` depends on nothing on the host except the shapes of its arguments.
        """
        self._compute = compute
        self._sender = sender
        self._graphs = graphs
        self._captured: dict[tuple[int, ...], dict[_Size, _Captured]] = {}  # by arenas

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of tokens that packs are padded to; empty if all packs run eagerly."""
        return () if self._graphs is None else SIZES

    def __call__(self, pack: Pack, arenas: list[Arena]) -> ForwardOutput:
        """Run a pack; the result has its own memory."""
        size = size_of(pack)
        if size is None or self._graphs is None:
            return self._eagerly(pack, arenas)
        captured = self._own(arenas).get(size)
        if captured is None:
            captured = self._capture(self._graphs, size, pack, arenas)
            if captured is None:
                return self._eagerly(pack, arenas)
        else:
            self._sender.send(captured.layout, pack, captured.numbers, size.longest)
        captured.replay()
        logits, hidden = captured.output.logits, captured.output.hidden
        own = None if hidden is None else hidden[: len(pack.tokens)].clone()
        return ForwardOutput(logits[: len(pack.logit_index)].clone(), own)

    def prepare(self, arenas: list[Arena], block_slots: int, hidden: HiddenLayers) -> None:
        """Capture passes of most sizes, in arenas that are empty before and afterwards."""
        for tokens in reversed(SIZES):  # the others reuse the memory of the largest
            if tokens <= _PREPARED and self._graphs is not None:
                self(_first_token(tokens, block_slots, hidden), arenas)
        for part in chain.from_iterable(arenas):
            part[0].zero_()

    def _own(self, arenas: list[Arena]) -> dict[_Size, _Captured]:
        where = tuple(keys.data_ptr() for keys, _ in arenas)
        if where not in self._captured and len(self._captured) == _ARENAS:
            self._captured.clear()
        return self._captured.setdefault(where, {})

    def _eagerly(self, pack: Pack, arenas: list[Arena]) -> ForwardOutput:
        layout = PackLayout.of(pack)
        there = buffer_on(arenas[0][0].device, layout)
        inputs = self._sender.send(layout, pack, there, pack.places.longest)
        return self._compute(inputs, arenas, pack.hidden)

    def _capture(
        self, graphs: GraphMaker, size: _Size, pack: Pack, arenas: list[Arena]
    ) -> _Captured | None:
        """Capture a graph with the pack as its input; return None if that fails."""
        layout = size.layout
        numbers = buffer_on(arenas[0][0].device, layout)
        inputs = self._sender.send(layout, pack, numbers, size.longest)

        def run() -> ForwardOutput:
            return self._compute(inputs, arenas, pack.hidden)

        try:
            for _ in range(_WARM_UPS):
                run()
            captured = _Captured(layout, numbers, *graphs.capture(run))
        except RuntimeError as error:  # raised by CUDA
            logger.warning("no CUDA graphs, forwards run eagerly: %s", error)
            self._graphs = None
            self._captured.clear()
            return None
        self._own(arenas)[size] = captured
        return captured


class CudaGraphs:
    """Implementation of `GraphMaker`; all graphs of a model share memory and free it together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device)  # torch's own is on the device that was used first
        self._pool: Any = None
        self._graphs = WeakSet[Any]()

    def capture(self, run: Callable[[], ForwardOutput]) -> tuple[Callable[[], None], ForwardOutput]:
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        if not self._graphs:  # a pool is freed with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            # Another thread may allocate on another device, which must not join this capture.
            with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                result = run()
        self._graphs.add(graph)
        return graph.replay, result


def size_of(pack: Pack) -> _Size | None:
    """Return the size of a pack's graph, or None if the pack runs eagerly."""
    tokens = len(pack.tokens)
    if not 0 < tokens <= SIZES[-1] or 2 * len(pack.logit_index) < tokens:
        return None
    rows, blocks = pack.places.tables.shape
    block, size = pack.places.block_slots, _next(SIZES, tokens)
    longest = max(_KEYS, _power_of_two(max(pack.places.longest, blocks * block)))
    path = max(_PATH, _power_of_two(pack.path_width))
    return _Size(
        tokens=size,
        path=path,
        longest=longest,
        rows=max(min(size, _ROWS), rows),
        block_slots=block,
        hidden=pack.hidden,
    )


def _first_token(tokens: int, block_slots: int, hidden: HiddenLayers) -> Pack:
    """Return a pack of `tokens` copies of one token, all in the first slot."""
    numbers = np.zeros((4, tokens), dtype=np.int32)
    numbers[3] = NO_TAIL
    index = torch.arange(tokens)
    places = PackPlaces(numbers, np.zeros((1, 1), dtype=np.int32), block_slots, None, 1)
    return Pack(torch.zeros_like(index), places, index, hidden)


def _next(sizes: Sequence[int], count: int) -> int:
    return sizes[bisect_left(sizes, count)]


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
