"""What rows gain of a verification; what fails for one of them is its own affair."""

from typing import Any

import pytest

from modelpool import ModelPool
from processors import VerifyResult
from processors.sampling_row import SamplingRow
from processors.score_edits import edit
from specrouter.execution.decoding_rows import DecodingRows
from specrouter.execution.logprobs import PromptLogprobs
from specrouter.request.params import SamplingParams
from tests.specrouter.execution.test_executor import Bench

CHAIN = ("small", "target")
PARAMS = {
    "plain": SamplingParams(max_new_tokens=12, ignore_eos=True),
    "log-probabilities": SamplingParams(
        max_new_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1
    ),
    "edited": SamplingParams(
        max_new_tokens=12, temperature=0.8, ignore_eos=True, repetition_penalty=1.3
    ),
}
_ROW = 1  # that fails


def run(pool: ModelPool, params: SamplingParams, cycles: int = 4) -> tuple[Bench, dict[int, str]]:
    bench = Bench(pool, prompts=[[5, 17, 300], [3, 4], [250, 1, 99]], params=params)
    errors: dict[int, str] = {}
    for _ in range(cycles):
        rows = [row for row in range(3) if row not in errors]
        result = bench.cycle(CHAIN, rows, depth=2)
        assert not {commit.row for commit in result.commits} & errors.keys()
        errors |= result.errors
    return bench, errors


@pytest.fixture(params=list(PARAMS.values()), ids=list(PARAMS))
def params(request: pytest.FixtureRequest) -> SamplingParams:
    params: SamplingParams = request.param
    return params


def spoil(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, concerns: Any, after: int = 0
) -> None:
    """Raises in calls that `concerns` picks by their arguments, but for the first `after`."""
    real, seen = getattr(owner, name), 0

    def changed(*arguments: Any, **options: Any) -> Any:
        nonlocal seen
        if concerns(*arguments):
            seen += 1
            if seen > after:
                raise ZeroDivisionError("odd")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, changed)


def assert_alone(pool: ModelPool, params: SamplingParams, bench: Bench) -> None:
    """Only the row has nothing more, and the others what they have otherwise."""
    expected, _ = run(pool, params)
    for row, (made, wanted) in enumerate(zip(bench.made(), expected.made(), strict=True)):
        assert made == wanted[: len(made)]
        assert row == _ROW or made == wanted


@pytest.mark.parametrize(
    ("owner", "name", "concerns", "after", "what"),
    [
        (DecodingRows, "extend", lambda _, row, __: row == _ROW, 1, "committing its tokens"),
        (
            VerifyResult,
            "path",
            lambda result, index: result.tree.rows[index] == _ROW,
            1,
            "choosing its tokens",
        ),
        (
            PromptLogprobs,
            "note",
            lambda _, row, __: row == _ROW,
            0,
            "log-probabilities of the prompt",
        ),
    ],
)
def test_what_fails_for_a_row_ends_it_alone(
    owner: Any,
    name: str,
    concerns: Any,
    after: int,
    what: str,
    pool: ModelPool,
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        spoil(patch, owner, name, concerns, after)
        bench, errors = run(pool, params)
    assert errors == {_ROW: f"{what} failed: ZeroDivisionError: odd"}
    assert_alone(pool, params, bench)


def test_a_row_that_no_token_can_be_chosen_for(
    pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are tried together, then each by itself: from the same logits, and one fails."""
    params = PARAMS["edited"]
    rows: list[SamplingRow] = []

    def changed(scores: Any, places: Any, contexts: Any) -> Any:
        if any(one is rows[_ROW] for one in places):
            raise ZeroDivisionError("odd")
        return edit(scores, places, contexts)

    opened = SamplingRow.__init__

    def note(row: SamplingRow, *arguments: Any) -> None:
        opened(row, *arguments)
        rows.append(row)

    with monkeypatch.context() as patch:
        patch.setattr(SamplingRow, "__init__", note)
        patch.setattr("processors.sampler.edit", changed)
        bench, errors = run(pool, params)
    assert errors == {_ROW: "no token could be chosen: ZeroDivisionError: odd"}
    assert_alone(pool, params, bench)


def test_a_row_whose_place_in_its_text_is_not_known(
    pool: ModelPool, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        spoil(patch, DecodingRows, "output_positions", lambda _, rows: _ROW in rows, after=1)
        bench, errors = run(pool, params)
    assert errors == {_ROW: "the place in its text failed: ZeroDivisionError: odd"}
    expected, _ = run(pool, params)
    for row, (made, wanted) in enumerate(zip(bench.made(), expected.made(), strict=True)):
        assert made == wanted[: len(made)]
        assert row == _ROW or len(made) >= 4, "a token in each cycle"
