"""Idle drafters are evaluated in turn, on the cheapest text, within their share of the time."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from specrouter.cycle import DraftShape, Option, ShadowEvaluation
from specrouter.profile.cycle_times import Workload
from specrouter.profile.snapshot import PerformanceSnapshot
from specrouter.request.params import Chain
from specrouter.routing.shadow_policy import MOST_TOKENS, next_shadow_evaluation
from specrouter.view import ChainDecision
from tests.specrouter.predictions import ALL, PAIR, TRIPLE, flat, geometric, rising, snapshot
from tests.specrouter.views import engine_view, request_view, table

TWIN, MIDDLE = ("twin", "big"), ("middle", "big")
TIMES = {"small": flat(1.0), "twin": rising(1.0, 0.01), "middle": flat(10.0), "big": flat(50.0)}
IDLE = {"small": 0, "twin": 20, "middle": 30}
USUAL = snapshot(TIMES, {PAIR: 0.6}, idle_cycles=IDLE, learning_ms=100_000.0)
MAIN = Option(chain=PAIR, shape=DraftShape(3, 2), cycle_ms=60.0, ms_per_token=20.0)
PREDICTED = {("big",): 50.0, PAIR: 20.0, TWIN: 21.0, MIDDLE: 22.0, TRIPLE: 20.5}
ROWS = (2, 5)
KEY = (("small",), "big", True)


def text_has_turned(known: PerformanceSnapshot, accepted: float = 30.0) -> PerformanceSnapshot:
    """`accepted`: of the last 100 best children, where 60 are usual."""
    seen = replace(geometric(0.6), recent_accepted=accepted, recent_trials=100.0)
    return replace(known, trees={**known.trees, KEY: seen})


def choice(
    known: PerformanceSnapshot = USUAL,
    predicted_ms: Mapping[Chain, float] = PREDICTED,
    lags: Mapping[int, int] | None = None,
    new: Mapping[str, int] | None = None,
    main: Option = MAIN,
    idle: Collection[str] = ALL,
) -> ShadowEvaluation | None:
    """`lags`: by row, of every model; `new`: tokens of each row to evaluate a model on."""

    requests = []
    for row in ROWS:
        by = {name: (lags or {}).get(row, 40) for name in TIMES}
        requests.append(request_view(row, row=row, unread_by=by, repeatable=60))
    seen = table(requests)
    for name, tokens in (new or {}).items():  # there is no more text to read than that
        seen.unread_by[name][:] = np.minimum(seen.unread_by[name], tokens)
    view = engine_view(performance=known)
    decision = ChainDecision(
        chain=main.chain,
        shape=main.shape,
        predicted=main,
        predicted_ms={**predicted_ms, main.chain: main.ms_per_token},
    )
    return next_shadow_evaluation(view, decision, seen, Workload(requests=2), idle)


def test_who_was_idle_for_longest_is_evaluated_first() -> None:
    assert choice() == ShadowEvaluation("middle", 2, MOST_TOKENS)
    turned = replace(USUAL, idle_cycles={**IDLE, "twin": 40})
    assert choice(turned) == ShadowEvaluation("twin", 2, MOST_TOKENS)


def test_models_in_use_and_those_that_drafted_just_now_are_not_evaluated() -> None:
    busy = replace(USUAL, idle_cycles={"small": 100, "twin": 2, "middle": 3})
    assert choice(busy) is None
    assert choice(main=replace(MAIN, chain=("middle", "twin", "big"))) is None


def test_models_that_rest_or_draft_in_another_group_are_not_evaluated() -> None:
    assert choice(idle=ALL - {"middle"}) == ShadowEvaluation("twin", 2, MOST_TOKENS)
    assert choice(idle=frozenset()) is None


def test_the_text_that_takes_least_to_read_is_taken() -> None:
    assert choice(lags={2: 300, 5: MOST_TOKENS}) == ShadowEvaluation("middle", 5, MOST_TOKENS)


def test_who_has_read_all_there_is_gives_way_to_the_next() -> None:
    assert choice(new={"middle": 5}) == ShadowEvaluation("twin", 2, MOST_TOKENS)
    assert choice(new={"middle": 5, "twin": 15}) == ShadowEvaluation("twin", 2, 15)
    assert choice(new={"middle": 5, "twin": 5}) is None


def test_shadow_evaluations_keep_within_half_a_percent_of_the_time() -> None:
    one = replace(USUAL, idle_cycles={"middle": 20})
    assert choice(one) is not None
    assert choice(replace(one, explored_share=0.00495)) is None  # 10 ms do not fit any more
    assert choice(replace(one, learning_ms=1_900.0)) is None
    assert choice(replace(USUAL, explored_share=0.00495)) == ShadowEvaluation(
        "twin", 2, MOST_TOKENS
    )


def test_no_shadow_evaluation_takes_longer_than_eight_cycles() -> None:
    rich = replace(USUAL, learning_ms=1e9)
    long = {2: 50_000, 5: 60_000}  # of which the twin reads a hundred in a millisecond
    assert choice(rich, lags=long) == ShadowEvaluation("middle", 2, MOST_TOKENS)
    one = replace(rich, idle_cycles={"twin": 20})
    assert choice(one, lags=long) is None
    assert choice(one, lags={**long, 5: 40_000}) == ShadowEvaluation("twin", 5, MOST_TOKENS)


def test_a_drafter_in_use_that_does_worse_than_usual_doubles_their_share() -> None:
    spent = replace(USUAL, explored_share=0.006)
    assert choice(spent) is None
    assert choice(text_has_turned(spent)) is not None
    assert choice(text_has_turned(spent, accepted=60.0)) is None
    assert choice(text_has_turned(replace(spent, explored_share=0.01))) is None


def test_who_promises_little_is_evaluated_when_the_text_turns_or_after_long() -> None:
    worse = {**PREDICTED, TWIN: 30.0, MIDDLE: 30.0}
    assert choice(predicted_ms=worse) is None
    assert choice(text_has_turned(USUAL), worse) is not None
    late = replace(USUAL, idle_cycles={**IDLE, "twin": 64})
    assert choice(late, worse) == ShadowEvaluation("twin", 2, MOST_TOKENS)
