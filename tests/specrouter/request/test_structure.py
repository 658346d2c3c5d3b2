"""Structured texts: what a grammar allows, exactly as the target chooses, whoever drafts."""

import copy
import json
import re
import sys
import threading
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer

from processors.grammar import Bits, Path
from specrouter import ChainRouter, RequestError, SamplingParams, Speculation, Structure
from specrouter.request.grammar import GrammarCompiler, RowGrammar, without_own_formats
from test_support.families import NAMES
from test_support.routers import assert_whole
from test_support.structures import SCHEMA, STRUCTURES, Reference

KINDS = pytest.mark.parametrize("structure", STRUCTURES, ids=lambda one: one.kind)
PROMPTS = ((17, 230, 41), (5, 301, 64, 99, 12), (250, 1))


@pytest.fixture(scope="module")
def tokens(router: ChainRouter) -> LLTokenizer:
    tokenizer: Any = router.pool.tokenizer
    return from_tokenizer(tokenizer, router.pool.vocab_size, sorted(router.pool.eos_token_ids))


@pytest.fixture(scope="module")
def compiler(router: ChainRouter) -> GrammarCompiler:
    pool = router.pool
    return GrammarCompiler(pool.tokenizer, pool.vocab_size, pool.eos_token_ids)


def ids_in(mask: Bits, size: int) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")[:size]).tolist()


def grow_tree(row: RowGrammar, random: np.random.Generator, size: int, vocab: int) -> list[Path]:
    """Paths of a tree, mostly of allowed ids, in a random order."""
    paths: list[Path] = [()]
    while len(paths) < size:
        parent = paths[int(random.integers(len(paths)))]
        mask = row.mask(parent)
        token = int(random.integers(vocab))
        if mask is not None and random.random() < 0.8:
            token = int(random.choice(ids_in(mask, vocab)))
        paths.append((*parent, token))
    return [paths[place] for place in random.permutation(len(paths))]


@KINDS
@pytest.mark.parametrize("seed", range(3))
def test_masks_of_trees_are_those_of_each_text_read_from_its_beginning(
    structure: Structure, seed: int, compiler: GrammarCompiler, tokens: LLTokenizer
) -> None:
    random, size = np.random.default_rng(seed), tokens.vocab_size
    row, shape = compiler.compile(structure).start(), compiler.compile(structure).start()
    reference, text = Reference(structure, tokens, 0), list[int]()
    (end,) = tokens.eos_tokens
    for _ in range(4):
        for path in grow_tree(shape, random, 9, size):
            mask = row.mask(path)
            legal = all(
                reference.allowed((*text, *path[:place]))[token] and token != end
                for place, token in enumerate(path)
                if row.mask(path[:place]) is not None
            )
            assert (mask is not None) == legal
            if mask is not None:
                wanted = np.flatnonzero(reference.allowed((*text, *path)))
                assert ids_in(mask, size) == wanted.tolist()
        first = row.mask(())
        assert first is not None
        going_on = [token for token in ids_in(first, size) if token != end]
        if not going_on:
            return
        text.append(int(random.choice(going_on)))
        for one in (row, shape):
            one.advance(text[-1:])


def test_drafts_of_structured_texts_are_accepted(router: ChainRouter) -> None:
    params = SamplingParams(max_new_tokens=40, structure=Structure("regex", "[a-z]{40,}"))
    output = router.generate(PROMPTS[0], params, Speculation(NAMES, depth=4, width=2))[0]
    assert output.metrics.acceptance_length > 1.2


def test_every_sampled_text_fits_its_schema(router: ChainRouter) -> None:
    structure = Structure("json_schema", json.dumps(SCHEMA))
    params = [
        SamplingParams(max_new_tokens=120, temperature=1.0, seed=seed, structure=structure)
        for seed in range(20)
    ]
    for output in router.generate([PROMPTS[0]] * len(params), params):
        assert output.finish_reason == "eos"
        jsonschema.validate(json.loads(output.text), SCHEMA)


def test_a_choice_is_one_of_the_texts_whatever_min_tokens_and_ignore_eos_say(
    router: ChainRouter,
) -> None:
    texts = ["the quick fox", "jumps", "é😀", "a\nb", "a", "ab"]
    structure = Structure("choice", json.dumps(texts))
    params = SamplingParams(
        temperature=1.0, n=32, seed=1, min_tokens=60, ignore_eos=True, structure=structure
    )
    outputs = router.generate(PROMPTS[0], params)
    assert {output.text for output in outputs} <= set(texts)
    assert len({output.text for output in outputs}) > 1
    assert {output.finish_reason for output in outputs} == {"eos"}


def test_what_excludes_all_that_a_structure_allows_ends_the_request_with_an_error(
    router: ChainRouter,
) -> None:
    ids = tuple((token,) for token in range(1, router.pool.vocab_size))
    structure = Structure("choice", '["the"]')
    params = SamplingParams(bad_words_ids=ids, structure=structure)
    output = router.generate(PROMPTS[0], params, Speculation(NAMES))[0]
    assert output.finish_reason == "error"
    assert output.error == "the sampling parameters leave no token to choose"
    assert output.error_field == "bad_words"


@pytest.mark.parametrize("chain", [("target",), *(NAMES[i:] for i in range(2))], ids=">".join)
def test_a_grammar_without_a_way_on_ends_its_own_request_alone(
    chain: tuple[str, ...], router: ChainRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrouter.request.grammar._TRIED_TEXTS", 0)
    dead_end = Structure("grammar", 'start: "ab" rest\nrest: rest "c"')
    params = [
        SamplingParams(max_new_tokens=8, structure=dead_end),
        SamplingParams(max_new_tokens=8, ignore_eos=True),
    ]
    wanted = router.generate(PROMPTS[0], params[1], "off")[0]
    bad, good = router.generate([PROMPTS[0]] * 2, params, Speculation(chain, depth=3))
    assert bad.finish_reason == "error"
    assert bad.error == "the structure cannot go on: allows no text"
    assert bad.error_field == "structure"
    assert good.token_ids == wanted.token_ids
    assert_whole(router)


class PanicException(BaseException):
    """What Rust's panics are in Python, under this name."""


@pytest.mark.parametrize("error", [PanicException("index out of bounds"), KeyError("no state")])
def test_a_matcher_that_panics_in_the_midst_of_a_path_stands_behind_the_text_again(
    compiler: GrammarCompiler,
    tokens: LLTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    def panic(*_: object) -> None:
        raise error

    compiled, size = compiler.compile(Structure("regex", "[ab]{2}[cd]{2}")), tokens.vocab_size
    row, other = compiled.start(), compiled.start()
    first = ids_in(_mask(other, ()), size)[0]
    for one in (row, other):
        one.advance([first])
    paths = [(), (ids_in(_mask(other, ()), size)[0],)]
    _mask(row, ())
    with monkeypatch.context() as patch:
        patch.setattr("specrouter.request.grammar.fill_next_token_bitmask", panic)
        with pytest.raises((RuntimeError, KeyError), match=str(error).strip("'")):
            row.mask(paths[1])
    for path in (*reversed(paths), *paths):
        assert ids_in(_mask(row, path), size) == ids_in(_mask(other, path), size)


def _mask(row: RowGrammar, path: Path) -> Bits:
    mask = row.mask(path)
    assert mask is not None
    return mask


DEEP = "".join(f"r{place}: r{place + 1} r{place + 1}\n" for place in range(3000))
SEPARATED = {"type": "object", "x-guidance": {"item_separator": 7}}
CONTRADICTION = {"type": "string", "minLength": 3, "maxLength": 1}
PRODUCT = {
    "allOf": [
        {"anyOf": [{"properties": {f"{i}.{j}": {"type": "integer"}}} for j in range(4)]}
        for i in range(9)
    ]
}
REFUSED = {
    "kind": (Structure("xml", "<a/>"), "must be one of"),  # type: ignore[arg-type]
    "no text": (Structure("regex", 7), "must be given as text"),  # type: ignore[arg-type]
    "surrogate": (Structure("regex", "\ud800"), "surrogate"),
    "no JSON": (Structure("json_schema", "{"), "is not JSON"),
    "no number": (Structure("json_schema", '{"const": NaN}'), "is not JSON"),
    "no object": (Structure("json_schema", "[1]"), "must be an object"),
    "type": (Structure("json_schema", '{"type": "thing"}'), "thing"),
    "keyword": (Structure("json_schema", '{"not": {}}'), "not"),
    "contradiction": (Structure("json_schema", json.dumps(CONTRADICTION)), "Unsatisfiable"),
    "never": (Structure("json_schema", "false"), "allows no text"),
    "options": (Structure("json_schema", json.dumps(SEPARATED)), "expected a string"),
    "depth": (Structure("json_schema", '{"items":' * 5000 + "true" + "}" * 5000), ""),
    "expression": (Structure("regex", "(a"), "invalid regex"),
    "no match": (Structure("regex", "[a&&b]"), "allows no text"),
    "no choice": (Structure("choice", "[]"), "choices"),
    "no texts": (Structure("choice", '["a", 1]'), "choices"),
    "half a choice": (Structure("choice", '["\\ud800"]'), "surrogate"),
    "unknown rule": (Structure("grammar", "start: other"), "unknown name"),
    "endless": (Structure("grammar", 'start: start "a"'), "allows no text"),
    "size": (Structure("json_schema", json.dumps(PRODUCT)), "too large"),
    "length": (Structure("regex", "a" * 100_000), "longer than"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_structure_is_refused_before_anything_is_queued(
    what: str, router: ChainRouter
) -> None:
    structure, reason = REFUSED[what]
    with pytest.raises(RequestError) as caught:
        router.submit(PROMPTS[0], SamplingParams(structure=structure))
    assert caught.value.field == "structure"
    assert reason in caught.value.reason
    assert len(caught.value.reason) < 400


def test_references_as_deep_as_a_source_is_long_do_not_crash(compiler: GrammarCompiler) -> None:
    source = f'start: r0\n{DEEP}r3000: "a"'
    with pytest.raises(RequestError, match="Too many items"):
        compiler.compile(Structure("grammar", source))


def test_structures_that_are_compiled_at_once_leave_other_threads_their_stacks(
    compiler: GrammarCompiler,
) -> None:
    usual, interval = threading.stack_size(), sys.getswitchinterval()

    def compile_several(number: int) -> None:
        for index in range(40):
            compiler.compile(Structure("regex", f"{number}-{index}"))

    threads = [threading.Thread(target=compile_several, args=(number,)) for number in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        left = threading.stack_size(usual)
    assert left == usual


def test_generated_tokens_that_the_structure_does_not_allow_are_refused(
    router: ChainRouter,
) -> None:
    digits = router.pool.tokenizer("12", add_special_tokens=False)["input_ids"]
    params = SamplingParams(structure=Structure("regex", "[0-9]+x"))
    with pytest.raises(RequestError) as caught:
        router.submit(PROMPTS[0], params, generated=[*digits, 300, 300])
    assert caught.value.field == "generated"


def test_a_list_or_a_mapping_is_kept_as_json() -> None:
    assert Structure("choice", ["yes", "no"]) == Structure("choice", '["yes", "no"]')
    assert Structure("json_schema", {"type": "object"}).source == '{"type": "object"}'
    assert Structure("json_object").source == ""
    with pytest.raises(ValueError, match="not JSON compliant"):
        Structure("json_schema", {"minimum": float("nan")})


def test_ids_that_a_vocabulary_leaves_out_are_no_ids_of_others(router: ChainRouter) -> None:
    """As of a vocabulary whose entries were pruned."""
    tokenizer: Any = copy.deepcopy(router.pool.tokenizer)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = backend["model"]["vocab"]
    last = max(vocab.values())
    moved = max(vocab, key=vocab.__getitem__)
    vocab[moved] = last + 140
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(backend))
    compiler = GrammarCompiler(tokenizer, last + 141, router.pool.eos_token_ids)
    row = compiler.compile(Structure("regex", "[a-z ]+")).start()
    mask = row.mask(())
    assert mask is not None
    assert len(mask) * 8 >= last + 141
    texts = [tokenizer.decode([one]) for one in ids_in(mask, last + 141)]
    assert texts
    assert all(re.fullmatch("[a-z ]+", one) for one in texts)


def test_formats_that_json_schema_does_not_define_are_left_out(compiler: GrammarCompiler) -> None:
    data = {"format": "path"}
    schema: dict[str, Any] = {
        "properties": {"format": {"type": "string", "format": "binary"}, "b": {"const": data}},
        "anyOf": [{"items": {"format": "password"}}, {"format": "ipv4"}],
    }
    assert without_own_formats(schema) == {
        "properties": {"format": {"type": "string"}, "b": {"const": data}},
        "anyOf": [{"items": {}}, {"format": "ipv4"}],
    }
    forms = (json.dumps({"type": "string", "format": name}) for name in ("byte", "json-pointer"))
    taken, refused = (Structure("json_schema", form) for form in forms)
    compiler.compile(taken)
    with pytest.raises(RequestError, match="Unknown format: json-pointer"):
        compiler.compile(refused)


def test_a_schema_that_is_too_deep_to_be_searched_for_formats_is_refused(
    compiler: GrammarCompiler,
) -> None:
    levels = 800
    deep = '{"items": ' * levels + '{"type": "string", "format": "path"}' + "}" * levels
    with pytest.raises(RequestError):
        compiler.compile(Structure("json_schema", deep))
