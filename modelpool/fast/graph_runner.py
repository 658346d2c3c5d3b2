"""GraphRunner: a forward as CUDA graphs, one for each size of pack, over inputs that stay in place.

Contract: a pack is filled up to the next size with copies of its last token, which compute and
write what that writes: no row is kept for padding. What a graph was captured for are tokens, width
of the tree's paths, length of the longest row and rows, each up to the next size, the hidden states
that are wanted, and the arenas. A capture takes as long as some dozens of passes: `prepare` makes
those that most packs need before there are any. Packs with many tokens and few logits (prompts),
and larger ones than the largest size, run eagerly; so does everything once a capture has failed,
with one warning. A pack's index arrays go to the device in one copy
(`modelpool.fast.pack_sender`), filled up on the host.

`GraphMaker` is CUDA's, or a stand-in for tests.
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
_KEYS = 1024  # of the shortest row that graphs tell apart; longer ones by powers of two
_PATH = 32  # steps, likewise
_ROWS = 64  # whose tables a graph has room for; more, and each number has graphs of its own
_PREPARED = 256  # tokens, at most: each graph keeps its logits, and few cycles have more
_ARENAS = 2  # whose graphs are kept: a model is timed in one for many rows, and one for long ones
_WARM_UPS = 2  # kernels compile, and libraries take their workspaces, before a capture

Compute = Callable[[PackInputs, Sequence[Arena], HiddenLayers], ForwardOutput]


class GraphMaker(Protocol):
    def capture(self, run: Callable[[], ForwardOutput]) -> tuple[Callable[[], None], ForwardOutput]:
        """What replays `run`, and where its result then stands.

        Raises `RuntimeError` where it cannot be captured.
        """


@dataclass(frozen=True, kw_only=True)
class _Size:
    """What a graph is captured for."""

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
    numbers: Tensor  # what it reads
    replay: Callable[[], None]
    output: ForwardOutput  # of all its T tokens, logits too


class GraphRunner:
    def __init__(
        self, compute: Compute, sender: PackSender, graphs: GraphMaker | None = None
    ) -> None:
        """`compute`: depends on nothing on the host but the shapes of what it is given. Without
        `graphs` all packs run eagerly."""
        self._compute = compute
        self._sender = sender
        self._graphs = graphs
        self._captured: dict[tuple[int, ...], dict[_Size, _Captured]] = {}  # by arenas

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens that packs are filled up to; none where all run eagerly."""
        return () if self._graphs is None else SIZES

    def __call__(self, pack: Pack, arenas: list[Arena]) -> ForwardOutput:
        """Of memory of its own."""
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
        """Captures passes of most sizes, in arenas that hold nothing yet and hold nothing after."""
        for tokens in reversed(SIZES):  # the memory of the largest serves all
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
        """With the pack in its inputs; None where it cannot be."""
        layout = size.layout
        numbers = buffer_on(arenas[0][0].device, layout)
        inputs = self._sender.send(layout, pack, numbers, size.longest)

        def run() -> ForwardOutput:
            return self._compute(inputs, arenas, pack.hidden)

        try:
            for _ in range(_WARM_UPS):
                run()
            captured = _Captured(layout, numbers, *graphs.capture(run))
        except RuntimeError as error:  # of CUDA
            logger.warning("no CUDA graphs, forwards run eagerly: %s", error)
            self._graphs = None
            self._captured.clear()
            return None
        self._own(arenas)[size] = captured
        return captured


class CudaGraphs:
    """Implements `GraphMaker`: all graphs of a model share their memory, and let it go together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device)  # torch's own is on whichever device was first
        self._pool: Any = None
        self._graphs = WeakSet[Any]()

    def capture(self, run: Callable[[], ForwardOutput]) -> tuple[Callable[[], None], ForwardOutput]:
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        if not self._graphs:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            # Another thread may work on another device meanwhile: what it allocates is no part of
            # this.
            with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                result = run()
        self._graphs.add(graph)
        return graph.replay, result


def size_of(pack: Pack) -> _Size | None:
    """What its graph is captured for; None: it has none."""
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
    """So many copies of one, in the first slot of all."""
    numbers = np.zeros((4, tokens), dtype=np.int32)
    numbers[3] = NO_TAIL
    index = torch.arange(tokens)
    places = PackPlaces(numbers, np.zeros((1, 1), dtype=np.int32), block_slots, None, 1)
    return Pack(torch.zeros_like(index), places, index, hidden)


def _next(sizes: Sequence[int], count: int) -> int:
    return sizes[bisect_left(sizes, count)]


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
