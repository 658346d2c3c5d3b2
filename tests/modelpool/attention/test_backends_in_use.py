"""A model on another backend says what it said: here the reference of path attention, on a CPU."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from modelpool.attention.backend import PATH, TRITON, AttentionBackend
from modelpool.attention.kv_view import Attention
from modelpool.attention.paged import PagedAttention
from modelpool.fast.cuda_forward import CudaForward, cuda_forward_of
from modelpool.packed_model import PackedModel
from processors import Sampler
from specrouter import ChainRouter, SamplingParams, Speculation
from test_support.llama_models import reference_kernels
from tests.modelpool.attention.fake_flashinfer import FakeWrapper
from tests.modelpool.fast.test_graph_runner import FakeGraphs

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


def texts(config: dict[str, Any], *speculations: "Speculation | str") -> list[list[list[int]]]:
    """With each of them, by one router."""
    params = [
        SamplingParams(max_new_tokens=12, temperature=0.9, seed=seed)
        for seed in range(len(PROMPTS))
    ]
    with ChainRouter.from_config(config) as router:
        found = [router.generate(PROMPTS, params, one) for one in speculations]  # type: ignore[arg-type]
        router.instruments.check_integrity()
    return [[list(one.token_ids) for one in outputs] for outputs in found]


def use(
    monkeypatch: pytest.MonkeyPatch,
    attend: Attention,
    graphed: Callable[[PackedModel], CudaForward | None],
) -> None:
    """All members attend by this, on this CPU, as if Triton were there."""
    monkeypatch.setattr("modelpool.placed_members.backend_for", lambda *_: TRITON)
    monkeypatch.setattr(AttentionBackend, "load", lambda backend: attend)
    monkeypatch.setattr("modelpool.loader._graphed", graphed)
    monkeypatch.setattr("specrouter.execution.runtime.sampler_for", lambda pool: Sampler)


@pytest.mark.parametrize("architecture", ["gemma2", pytest.param("llama", marks=pytest.mark.exact)])
def test_trees_by_flashinfer_give_the_texts_of_masks(
    architecture: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts, re-scoring and verification of trees, in float64; drafters' states are in order."""
    from test_support.families import pool_settings, save_family

    family = save_family(tmp_path, architecture)
    engine = {"max_requests": 4, "max_model_len": 128, "prefill_chunk": 3, "preload": False}
    config = {"pool": pool_settings(family), "engine": engine}
    wanted = texts(copy.deepcopy(config), "off")
    attend = mock.Mock(wraps=PagedAttention(lambda device: FakeWrapper()))
    use(monkeypatch, attend, lambda packed: None)
    names = tuple(model["name"] for model in config["pool"]["models"])
    assert texts(config, Speculation(names, depth=4, width=3)) == wanted
    assert attend.called


@pytest.mark.long
def test_trees_over_graphs_give_the_texts_of_the_target_alone(
    small_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward for CUDA with reference kernels, graphs by a stand-in, in the whole engine."""
    graphs = FakeGraphs()

    def graphed(packed: PackedModel) -> CudaForward | None:
        return cuda_forward_of(packed, reference_kernels(), graphs)

    use(monkeypatch, PATH.load(), graphed)
    monkeypatch.setattr("modelpool.fast.graph_runner.SIZES", (1, 2, 4, 8, 16, 32, 64, 128))
    config = copy.deepcopy(small_config)
    names = tuple(model["name"] for model in config["pool"]["models"])
    chains = [
        Speculation(names, depth=4, width=3),
        Speculation((names[0], names[-1]), depth=4, width=1),
    ]
    prepare, ready = CudaForward.prepare, list[int]()

    def prepared(forward: CudaForward, *what: Any) -> None:
        prepare(forward, *what)
        ready.append(graphs.captured)

    monkeypatch.setattr(CudaForward, "prepare", prepared)
    wanted, *found = texts(config, "off", *chains)
    assert found == [wanted, wanted]
    assert ready == [graphs.captured], "a graph was captured while requests waited"
    assert graphs.replayed > graphs.captured


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma2", marks=pytest.mark.exact)])
def test_a_configured_reference_gives_the_texts_of_masks(architecture: str, tmp_path: Any) -> None:
    from test_support.families import pool_settings, save_family

    engine = {"max_requests": 4, "max_model_len": 128, "prefill_chunk": 3, "preload": False}
    pool = pool_settings(save_family(tmp_path, architecture))
    config = {"pool": pool, "engine": engine}
    wanted = texts(config, "off")
    pool["attention"] = "path"
    names = tuple(model["name"] for model in config["pool"]["models"])
    with ChainRouter.from_config(config) as router:
        assert {router.pool.get(name).attention for name in names} == {PATH}
    assert texts(config, Speculation(names, depth=4, width=3)) == wanted
