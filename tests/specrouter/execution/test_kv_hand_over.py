"""A request goes on at another engine from what one has read, with the same text."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrouter import ChainRouter, RequestOutput, SamplingParams
from specrouter.engine.request import Request
from specrouter.engine.serving import streamed
from specrouter.execution.executor import Executor
from specrouter.request.output import Delta
from specrouter.request.spec import HandedKV
from statemgr import RowKV
from test_support.factories import HYBRIDS
from test_support.families import pool_settings, save_family

PROMPT = tuple(5 + 7 * at % 300 for at in range(75))  # three chunks of 32
KINDS = {
    "greedy": SamplingParams(max_new_tokens=24, ignore_eos=True),
    "sampled": SamplingParams(max_new_tokens=24, temperature=0.9, seed=3, ignore_eos=True),
    "penalties": SamplingParams(
        max_new_tokens=20, temperature=0.7, seed=5, presence_penalty=0.8, repetition_penalty=1.2
    ),
    "logprobs": SamplingParams(
        max_new_tokens=12, temperature=0.5, seed=4, logprobs=1, prompt_logprobs=0
    ),
}
Routers = tuple[ChainRouter, ChainRouter]


@pytest.fixture(scope="module", params=["float64", "bfloat16"])
def routers(request: pytest.FixtureRequest, small_config: dict[str, Any]) -> Iterator[Routers]:
    """One that reads prompts, and one that goes on."""
    settings = copy.deepcopy(small_config)
    for model in settings["pool"]["models"]:
        model["dtype"] = request.param
    settings["engine"]["prefix_cache"] = False  # nothing is known of a prompt but what is handed
    with ExitStack() as stack:
        one, other = (stack.enter_context(ChainRouter.from_config(settings)) for _ in "12")
        yield one, other


def news(router: ChainRouter, params: SamplingParams, **more: Any) -> list[Delta]:
    async def collect() -> list[Delta]:
        asked = Request(prompt=PROMPT, params=params, speculation=None, slo=None, **more)
        async with streamed(router, [asked]) as deltas:
            return [delta async for _, delta in deltas]

    return asyncio.run(collect())


def read(router: ChainRouter, params: SamplingParams) -> tuple[list[RowKV], Delta]:
    """The parts of what was read, and the end."""
    *before, end = news(router, params, prefill_only=True)
    return [delta.kv for delta in before if delta.kv is not None], end


def gone_on(
    router: ChainRouter, params: SamplingParams, end: Delta, kv: Iterable[RowKV]
) -> RequestOutput:
    params = replace(params, prompt_logprobs=None)  # they have come
    last = news(router, params, generated=end.token_ids, kv=HandedKV(list(kv)))[-1]
    assert last.output is not None
    return last.output


def imported(router: ChainRouter) -> int:
    return router.instruments.engine_state().cache.imported_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_goes_on_and_no_prompt_token_is_read_again(
    routers: Routers, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (reads, decodes), params = routers, KINDS[kind]
    [whole] = reads.generate([list(PROMPT)], params)
    parts, end = read(reads, params)
    assert (end.goes_on, end.finish_reason, end.token_ids) == (True, "length", whole.token_ids[:1])
    assert [part.start for part in parts] == [0, 32, 64], "as they are read"
    assert parts[-1].stop == len(PROMPT)
    unread, original = [0], Executor.unread

    def watched(executor: Executor, rows: Iterable[int]) -> dict[int, int]:
        found = original(executor, rows)
        unread.extend(found.values())
        return found

    monkeypatch.setattr(Executor, "unread", watched)
    before = imported(decodes)
    output = gone_on(decodes, params, end, parts)
    assert output.token_ids == whole.token_ids
    assert output.text == whole.text
    assert output.finish_reason == whole.finish_reason
    assert imported(decodes) - before == len(PROMPT)
    assert max(unread) == 0, "the target had read all"
    decodes.instruments.check_integrity()


@pytest.mark.parametrize(
    "architecture",
    [
        name if name == "qwen3.5" else pytest.param(name, marks=pytest.mark.exact)
        for name in HYBRIDS
    ],
)
def test_recurrent_states_go_on_with_the_last_keys_and_values(
    architecture: str, tmp_path: Path
) -> None:
    engine = {"max_requests": 2, "max_model_len": 128, "prefill_chunk": 32, "prefix_cache": False}
    pool = pool_settings(save_family(tmp_path, architecture))
    settings = {"pool": pool, "engine": engine}
    with ChainRouter.from_config(settings) as reads, ChainRouter.from_config(settings) as decodes:
        params = KINDS["sampled"]
        [whole] = reads.generate([list(PROMPT)], params, "off")
        parts, end = read(reads, params)
        assert [len(part.state) > 0 for part in parts] == [False, False, True]
        assert gone_on(decodes, params, end, parts).token_ids == whole.token_ids
        assert imported(decodes) == len(PROMPT)
        decodes.instruments.check_integrity()


def test_what_is_of_another_model_or_text_is_read_again(
    routers: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    (reads, decodes), params = routers, KINDS["sampled"]
    [whole] = reads.generate([list(PROMPT)], params)
    parts, end = read(reads, params)
    of_other = replace(parts[0], format=replace(parts[0].format, model="fp_other"))
    before, nothing = imported(decodes), np.zeros(0, dtype=np.uint8)
    for bad in (
        of_other,
        replace(parts[0], text="0"),
        replace(parts[0], data=nothing),
    ):
        assert gone_on(decodes, params, end, [bad]).token_ids == whole.token_ids
    assert imported(decodes) == before
    assert "handed over of the model fp_other, not fp_" in caplog.text
    assert sum(decodes.instruments.engine_state().control_faults.values()) == 0
