"""Recorded texts: what is said is given, and drafting costs and brings what it would anyway."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from processors.grammar import Path, allows
from research.bench.recorded_text import RecordedText
from specrouter import (
    ChainRouter,
    RequestError,
    RequestOutput,
    SamplingParams,
    Speculation,
)
from test_support.families import NAMES

SIZE = 300  # ids
PROMPT = [17, 230, 41]
UNLIKELY = [random.Random(place).randrange(5, SIZE) for place in range(24)]


@pytest.fixture(scope="module")
def router(small_config: dict[str, Any]) -> Iterator[ChainRouter]:
    """It drafts from the text itself, too."""
    settings = copy.deepcopy(small_config)
    settings["pool"]["models"].append({"name": "ngram", "source": "ngram"})
    with ChainRouter.from_config(settings) as opened:
        yield opened


def allowed(recorded: RecordedText, said: list[int], path: Path) -> list[int] | None:
    row = recorded.start()
    row.advance(said)
    mask = row.mask(path)
    return None if mask is None else [one for one in range(SIZE) if allows(mask, one)]


def test_the_next_recorded_token_alone_is_allowed_and_off_the_text_everything() -> None:
    recorded = RecordedText((4, 299, 8), SIZE)
    assert allowed(recorded, [], ()) == [4]
    assert allowed(recorded, [4], ()) == [299]
    assert allowed(recorded, [], (4, 299)) == [8]
    assert allowed(recorded, [4], (298,)) is None
    assert allowed(recorded, [4, 299, 8], ()) is None
    assert allowed(recorded, [4], (299, 8)) is None


def test_a_text_that_goes_on_must_have_begun_as_recorded() -> None:
    recorded = RecordedText((4, 5, 6), SIZE)
    recorded.check([4, 5])
    recorded.check([4, 5, 6, 200])  # behind its end anything goes
    with pytest.raises(RequestError, match=r"^generated: .* token 2"):
        recorded.check([4, 6])


def said(
    router: ChainRouter, text: list[int], *chain: str, temperature: float = 0
) -> RequestOutput:
    params = SamplingParams(
        max_new_tokens=len(text),
        temperature=temperature,
        seed=1,
        structure=RecordedText(tuple(text), router.pool.vocab_size),
    )
    [output] = router.generate([PROMPT], params, Speculation(chain, depth=4))
    assert output.error is None
    return output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chain", [NAMES[-1:], (NAMES[0], NAMES[-1]), NAMES, ("ngram", NAMES[-1])])
def test_every_chain_says_what_is_recorded(
    router: ChainRouter, chain: tuple[str, ...], temperature: float
) -> None:
    assert said(router, UNLIKELY, *chain, temperature=temperature).token_ids == UNLIKELY


@pytest.mark.parametrize("chain", [(NAMES[0], NAMES[-1]), NAMES])
def test_no_model_before_the_target_knows_what_is_recorded(
    router: ChainRouter, chain: tuple[str, ...]
) -> None:
    metrics = said(router, UNLIKELY, *chain).metrics
    assert metrics.drafted_tokens > len(UNLIKELY)  # nothing of the drafts is pruned
    assert metrics.accepted_tokens < len(UNLIKELY) / 4


def test_what_the_text_says_again_is_drafted_from_it(router: ChainRouter) -> None:
    again = said(router, UNLIKELY * 3, "ngram", NAMES[-1]).metrics
    assert again.accepted_tokens > len(UNLIKELY)
