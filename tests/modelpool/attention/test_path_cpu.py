"""Attention in C: a token's bits depend on its own keys alone, and are those of plain C."""

import ctypes
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelpool.attention import path_cpu
from modelpool.attention.kv_view import AttentionLayer
from modelpool.attention.path import NO_TAIL, KeyPaths, reference
from modelpool.attention.path_cpu import PLAIN, attend, available_sets, best_set
from modelpool.fast.cpu import cpu_threads
from modelpool.kernels.library import c_library
from test_support.packs import BLOCK, Row, changed, paths_of, size_of, tables_of

pytestmark = pytest.mark.skipif(c_library() is None, reason="no C library")

ERRORS = {torch.float64: 1e-12, torch.float32: 3e-6}  # of the queries' precision
# Query heads, key heads, width of a key and of a value; of latents the value is a part of the key.
HEADS = (
    (9, 3, 64, 64), (14, 2, 64, 64), (12, 2, 128, 128), (8, 8, 72, 40), (5, 1, 7, 3),
    (40, 1, 16, 16), (3, 1, 160, 144),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    query: Tensor
    keys: Tensor
    values: Tensor
    paths: KeyPaths
    layer: AttentionLayer

    def attended(self, instruction_set: int, threads: int = 1) -> Tensor:
        with cpu_threads(threads):
            return attend(
                library(), instruction_set, self.query, self.keys, self.values, self.paths,
                self.layer,
            )  # fmt: skip

    def of_token(self, token: int) -> "Case":
        """Alone in its pack."""
        paths = changed(self.paths, lambda part: part[token : token + 1])
        return replace(self, query=self.query[token : token + 1], paths=paths)

    def keys_of(self, token: int) -> Tensor:
        """Slots of the arena that it reads."""
        paths, layer = self.paths, self.layer
        position, tail = int(paths.positions[token]), int(paths.tails[token])
        first = max(0, position + 1 - (layer.window or NO_TAIL))
        own = [
            j if j < tail else tail + int(paths.path[token, j - tail])
            for j in range(first, position + 1)
        ]
        slots = torch.tensor(own)
        blocks = paths.tables[int(paths.rows[token])].long()[slots // BLOCK]
        return blocks * BLOCK + slots % BLOCK


def library() -> ctypes.CDLL:
    found = c_library()
    assert found is not None
    return found


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> Case:
    rows = [
        Row(
            draw(st.sampled_from((0, 3, 31, 250, 255, 256, 300, 520))),
            draw(st.integers(0, 20)),
            tuple(draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 7)))),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    rows = [row if row.count else replace(row, texts=1) for row in rows]
    heads, kv_heads, dim, value_dim = draw(st.sampled_from(HEADS))
    dtype, seed = draw(st.sampled_from(dtypes)), draw(st.integers(0, 99))
    chance = torch.Generator().manual_seed(seed)
    slots, tokens = size_of(rows), sum(row.count for row in rows)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    keys = torch.randn(slots, kv_heads, dim, generator=chance).to(dtype)
    values = torch.randn(slots, kv_heads, value_dim, generator=chance).to(dtype)
    if dim > value_dim and draw(st.booleans()):
        values = keys[..., :value_dim]
    query = torch.randn(tokens, heads, dim, generator=chance).to(wide)
    layer = AttentionLayer(
        0,
        dim**-0.5,
        draw(st.none() | st.integers(1, 300)),
        draw(st.sampled_from((None, 1.5, 30.0))),
        torch.randn(heads, generator=chance) if draw(st.booleans()) else None,
    )
    return Case(query, keys, values, paths_of(rows, tables_of(rows, seed)), layer)


SMALL = (torch.float32, torch.float16, torch.bfloat16)


@settings(max_examples=60)
@given(cases(SMALL), st.integers(1, 8))
def test_all_instruction_sets_and_threads_have_the_bits_of_plain_c(
    case: Case, threads: int
) -> None:
    wanted = case.attended(PLAIN)
    for instruction_set in available_sets(library()):
        assert torch.equal(case.attended(instruction_set, threads), wanted)
    half = replace(case, query=case.query.bfloat16())
    assert torch.equal(half.attended(best_set(), threads), half.attended(PLAIN))


@settings(max_examples=60)
@given(cases((*SMALL, torch.float64)), st.data())
def test_a_token_has_the_same_bits_alone_and_in_any_blocks(case: Case, data: st.DataObject) -> None:
    wanted = case.attended(best_set(), threads=2)
    token = data.draw(st.integers(0, len(case.query) - 1))
    assert torch.equal(case.of_token(token).attended(best_set())[0], wanted[token])
    chance = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    moved = torch.randperm(len(case.keys) // BLOCK, generator=chance)
    slots = (moved[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    keys, values = torch.empty_like(case.keys), torch.empty_like(case.values)
    keys[slots], values[slots] = case.keys, case.values
    tables = moved[case.paths.tables.long()].int()
    other = replace(case, keys=keys, values=values, paths=replace(case.paths, tables=tables))
    assert torch.equal(other.attended(best_set(), threads=2), wanted)


@settings(max_examples=60)
@given(cases((torch.float32, torch.float64)))
def test_it_is_the_reference(case: Case) -> None:
    wide = [part.double() for part in (case.query, case.keys, case.values)]
    wanted = reference(wide[0], wide[1], wide[2], case.paths, case.layer)
    got = case.attended(best_set(), threads=2)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=ERRORS[case.query.dtype])


@settings(max_examples=60)
@given(cases((*SMALL, torch.float64)), st.data())
def test_what_is_no_key_of_a_token_may_be_no_number(case: Case, data: st.DataObject) -> None:
    wanted = case.attended(best_set(), threads=2)
    token = data.draw(st.integers(0, len(case.query) - 1))
    others = torch.ones(len(case.keys), dtype=torch.bool)
    others[case.keys_of(token)] = False
    keys, values = case.keys.clone(), case.values.clone()
    keys[others], values[others] = torch.nan, torch.nan
    poisoned = replace(case, keys=keys, values=values)
    assert torch.equal(poisoned.attended(best_set(), threads=2)[token], wanted[token])


def test_a_key_that_is_no_number_makes_its_tokens_none() -> None:
    row = Row(300, 2, ())
    tables = tables_of([row])
    keys, values = torch.randn(2, size_of([row]), 1, 16)
    case = Case(torch.randn(2, 2, 16), keys, values, paths_of([row], tables), AttentionLayer(0, 1))
    keys[case.keys_of(1)[-1]] = torch.nan  # of the second token's own position
    for instruction_set in available_sets(library()):
        got = case.attended(instruction_set)
        assert got[0].isfinite().all()
        assert got[1].isnan().all()


def test_a_set_with_other_bits_than_plain_c_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(path_cpu, "_has_plain_bits", lambda *_: False)
    best_set.cache_clear()
    try:
        assert best_set() == PLAIN
    finally:
        best_set.cache_clear()
    assert "other bits than plain C" in caplog.text or available_sets(library()) == (PLAIN,)


def test_without_the_library_the_reference_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_library` has the one line that says so."""
    monkeypatch.setattr(path_cpu, "c_library", lambda: None)
    attention = path_cpu.cpu_attention()
    assert getattr(attention, "kernels", None) is reference
