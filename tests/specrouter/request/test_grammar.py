"""What llguidance cannot do is found before a request is queued; what it can do is served."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrouter.request import grammar
from specrouter.request.grammar import GrammarCompiler
from specrouter.request.params import RequestError
from specrouter.request.structure import Structure
from test_support.factories import make_tokenizer


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tokenizer(folder)
    return GrammarCompiler(tokenizer, len(tokenizer), [0])


def schema(value: dict[str, Any]) -> Structure:
    return Structure("json_schema", json.dumps(value))


def properties(name: str, count: int) -> dict[str, Any]:
    return {"properties": {f"{name}{index}": {"type": "integer"} for index in range(count)}}


RULES = "\n".join(f'r{i}: "a{i}" r{(i + 1) % 1000}?' for i in range(1000))
LARGE = {
    "enum of objects": schema({"enum": [{"a": index} for index in range(3000)]}),
    "optional properties": schema({"type": "object", **properties("p", 1400)}),
    "alternatives": schema({"anyOf": [properties(f"p{index}_", 6) for index in range(80)]}),
    "rules": Structure("grammar", f"start: {' | '.join(f'r{i}' for i in range(1000))}\n{RULES}"),
    "choice": Structure("choice", json.dumps([f"choice {index}" for index in range(3000)])),
}
TOO_LARGE = {
    "repetitions": Structure("regex", "(a{1000}){1000}"),
    "no way on": Structure("grammar", 'start: "ab" rest\nrest: rest "c"'),
    "items": schema({"enum": [{"a": index} for index in range(4000)], **properties("p", 300)}),
}


def test_tokens_that_the_model_does_not_know_are_in_no_mask(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    known = len(tokenizer) - 1
    row = GrammarCompiler(tokenizer, known, [0]).compile(Structure("regex", "a+")).start()
    mask = row.mask(())
    assert mask is not None
    assert len(mask) == known // 8


CALLS = 'start: "a" ("," "a"){0,2} ","?'


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("text", "goes_on"),
    [("", "a"), ("a", None), ("a,", None), ("a,a,a", None), ("ax", ""), ("a,x", ""), ("a,\n", "")],
)
def test_an_open_end_takes_any_id_and_ends_with_one_that_is_not_its_own(
    text: str, goes_on: str | None, at_once: bool, compiler: GrammarCompiler
) -> None:
    """`goes_on`: what may follow beside the end; None: anything."""
    compiled = compiler.compile(Structure("grammar", CALLS, open_ended=True))
    row, ids = compiled.start(), [compiler._tokenizer(one)["input_ids"][0] for one in text]
    if not at_once:
        for token in ids:
            row.advance([token])
        ids = []
    mask = row.mask(tuple(ids))
    assert mask is not None
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: compiled.vocab_size])
    expected = [*range(compiled.vocab_size)]
    if goes_on is not None:
        expected = compiler._tokenizer(goes_on)["input_ids"] or [0]
    assert allowed.tolist() == expected
    compiled.check([compiler._tokenizer(one)["input_ids"][0] for one in text] + [0])


@pytest.mark.parametrize("name", LARGE)
def test_large_structures_are_served(name: str, compiler: GrammarCompiler) -> None:
    row = compiler.compile(LARGE[name]).start()
    for _ in range(12):
        mask = row.mask(())
        if mask is None:
            return
        row.advance([int(np.flatnonzero(np.unpackbits(mask, bitorder="little"))[-1])])


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_fails_a_few_tokens_later_is_refused_before(
    name: str, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_TRIED_S", 600.0)
    with pytest.raises(RequestError) as caught:
        compiler.compile(TOO_LARGE[name])
    assert caught.value.field == "structure"
