"""Attention through FlashInfer's wrapper is path attention; a stand-in runs its plans on a CPU."""

import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelpool.attention.backend import FLASHINFER
from modelpool.attention.kv_view import AttentionLayer
from modelpool.attention.paged import PagedAttention, flashinfer_attention
from modelpool.attention.path import reference
from modelpool.errors import UnsupportedAttention
from modelpool.in_flight import InFlight, Mark, Reached
from test_support.packs import (
    Row,
    View,
    packs,
    windows,
)
from tests.modelpool.attention.fake_flashinfer import FakeWrapper


def attend(attention: PagedAttention, view: View, layer: AttentionLayer) -> Tensor:
    return attention(view, layer, view.query())  # type: ignore[arg-type]


class Later(Reached):
    """A mark that the device comes to when it is told, or waited for."""

    is_reached = waited = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.waited |= not self.is_reached
        self.is_reached = True


class Wrappers(list[FakeWrapper]):
    """All that were made."""

    def __call__(self, device: torch.device) -> FakeWrapper:
        self.append(FakeWrapper())
        return self[-1]


TREES = [Row(5, 1, (-1, -1, 0, 2)), Row(9, 2, ()), Row(0, 3, (-1, 0))]
TEXTS = [Row(5, 1, ()), Row(9, 2, ())]


@settings(max_examples=60)
@given(packs, windows, st.sampled_from([None, 0.7]))
def test_each_token_attends_to_its_own_path(
    rows: list[Row], window: int | None, softcap: float | None
) -> None:
    view = View.of(rows)
    layer = AttentionLayer(0, 0.3, window, softcap)
    got = attend(PagedAttention(Wrappers()), view, layer)
    wanted = reference(view.query().transpose(0, 1), view.keys, view.values, view.paths, layer)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rows", "plans"), [(TREES, 2), (TEXTS, 2)])
def test_a_pack_is_planned_once_for_each_kind_of_layer(rows: list[Row], plans: int) -> None:
    made, view = Wrappers(), View.of(rows)
    attention = PagedAttention(made)
    for number, window in enumerate((None, 4, None, 4, 100)):  # nothing is 100 positions away
        attend(attention, view, AttentionLayer(number, 0.3, window))
    assert [wrapper.plans for wrapper in made] == [1] * plans
    assert sorted(wrapper.runs for wrapper in made) == [2, 3]
    attend(attention, View.of(rows), AttentionLayer(0, 0.3))
    assert sum(wrapper.plans for wrapper in made) == plans + 1


def test_a_wrapper_plans_again_only_when_its_last_plan_was_copied() -> None:
    made, marks = Wrappers(), list[Later]()

    def mark(device: torch.device) -> Mark:
        marks.append(Later())
        return marks[-1]

    attention, layer = PagedAttention(made, mark), AttentionLayer(0, 0.3)
    for _ in range(3):
        attend(attention, View.of(TREES), layer)
    assert [wrapper.plans for wrapper in made] == [1, 1, 1]
    marks[0].is_reached = True
    attend(attention, View.of(TREES), layer)
    assert [wrapper.plans for wrapper in made] == [2, 1, 1]
    assert not any(mark.waited for mark in marks)
    for _ in range(20):
        attend(attention, View.of(TREES), layer)
    assert len(made) == 8
    assert any(mark.waited for mark in marks)


def test_all_that_are_taken_and_not_given_back_are_a_mistake() -> None:
    things = InFlight(object, most=1)
    things.take()
    with pytest.raises(RuntimeError, match="all are taken"):
        things.take()


def test_a_version_that_keeps_its_masks_otherwise_is_refused() -> None:
    class Other:
        def plan(self, *arrays: Tensor, **settings: object) -> None:
            pass

        def run(self, query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
            return query

    attention = PagedAttention(lambda device: Other())
    with pytest.raises(UnsupportedAttention, match="flashinfer keeps its masks otherwise"):
        attend(attention, View.of(TREES), AttentionLayer(0, 0.3))


def test_wrappers_of_a_device_share_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Wrapper(FakeWrapper):
        def __init__(self, workspace: Tensor, layout: str, backend: str) -> None:
            super().__init__()
            made.append((workspace, layout, backend))

    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("modelpool.attention.paged.WORKSPACE_BYTES", 64)
    attention, view = flashinfer_attention(), View.of(TREES)
    for window in (None, 3):
        attend(attention, view, AttentionLayer(0, 0.3, window))
    assert [(layout, backend) for _, layout, backend in made] == [("NHD", "fa2")] * 2
    assert made[0][0] is made[1][0]


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(UnsupportedAttention, match="attention: flashinfer cannot be imported"):
        FLASHINFER.load()
