"""A stream brings what samples say to a coroutine, and cancels them where it is closed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from specrouter import Delta, RequestOutput
from specrouter.request.delta_stream import DeltaStreams
from tests.specrouter.cluster.test_resume import last


class Sample:
    cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


def test_deltas_come_until_every_sample_has_told_its_last() -> None:
    async def run() -> list[tuple[int, list[int]]]:
        async with aclosing(DeltaStreams().open()) as stream:
            stream.begin([Sample(), Sample()])
            for number, delta in ((1, Delta(token_ids=[5])), (1, last(6)), (0, last(7))):
                stream.tell(number, delta)
            return [(number, delta.token_ids) async for number, delta in stream]

    assert asyncio.run(run()) == [(1, [5]), (1, [6]), (0, [7])]


def test_a_last_delta_that_is_not_shown_ends_its_sample_all_the_same() -> None:
    async def run() -> list[RequestOutput | None]:
        stream = DeltaStreams().open()
        stream.read = lambda delta: None if delta.output is None else delta
        stream.begin([Sample()])
        stream.tell(0, Delta(token_ids=[5]))
        stream.tell(0, last(6))
        return [delta.output async for _, delta in stream]

    assert asyncio.run(run()) == [last(6).output]


def test_whatever_begins_before_or_after_the_close_is_cancelled() -> None:
    async def run(closes_first: bool) -> int:
        stream, sample = DeltaStreams().open(), Sample()
        if closes_first:
            await stream.aclose()
        stream.begin([sample])
        if not closes_first:
            await stream.aclose()
        return sample.cancelled

    assert [asyncio.run(run(first)) for first in (True, False)] == [1, 1]
