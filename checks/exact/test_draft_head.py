"""A head that reads the target's hidden states is a drafter of one file, and changes no token."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from checks.exact.arguments import open_oracle
from checks.exact.arrangement import Arrangement, modes_of
from checks.exact.array_check import make_cases
from checks.exact.comparison import Case, all_divergences, compare
from checks.exact.covering_array import covering_array
from modelpool import ConfigError
from processors import Contexts, DraftResult
from processors.beam import Beam
from specrouter import ChainRouter, SamplingParams, Speculation
from specrouter.cycle import Ints
from specrouter.execution.drafter import Drafter
from specrouter.execution.group_draft import GroupDraft
from specrouter.request.spec import RequestSpec
from test_support.families import pool_settings, save_family
from test_support.params import greedy_params, seeded_params
from test_support.routers import assert_whole

NEW_TOKENS, REQUESTS = 12, 16
PAIR, OTHERS = ("head", "target"), ("small", "target")


class ToyHead(Drafter):
    """Untrained: adds what the target made of a text's last token that it has read to the embedding
    of the next one, and of each that it drafts itself. It shares embedding and output."""

    hidden = (1, 2)

    def __init__(self, name: str, runtime: Any) -> None:
        super().__init__(name, runtime)
        self._embedding: Any = None
        self._output: Any = None
        self._last: dict[int, Tensor] = {}  # [H] by row
        self.heard: dict[int, list[tuple[int, int, Tensor]]] = {}

    @property
    def is_open(self) -> bool:
        return self._embedding is not None

    def prepare(self) -> None:
        model: Any = self._runtime.pool.get(self._runtime.pool.target).model
        self._embedding, self._output = model.get_input_embeddings(), model.get_output_embeddings()

    def open(self, row: int, request: RequestSpec) -> None:
        self._last.pop(row, None)
        self.heard[row] = []

    def close(self, row: int) -> None:
        self._last.pop(row, None)

    def feed(self, rows: Ints, tokens: Ints, positions: Ints, hidden: Tensor) -> None:
        told = zip(rows.tolist(), positions.tolist(), tokens.tolist(), hidden, strict=True)
        for row, position, token, states in told:
            self._last[row] = states[-1]
            self.heard[row].append((position, token, states))

    def draft(self, draft: GroupDraft) -> DraftResult:
        started, request, runtime = time.perf_counter(), draft.request, self._runtime
        rows, width, levels = request.rows, request.width, int(request.depths.max())
        beam = Beam(rows, request.depths, width, request.branching)
        roots = torch.from_numpy(runtime.manager.tokens[rows, runtime.manager.counts[rows] - 1])
        embedded = self._embedding(roots)
        nothing = torch.zeros_like(embedded[0])
        states = torch.stack([self._last.get(row, nothing) for row in rows.tolist()])
        everyone, no_paths = np.arange(len(rows)), torch.zeros((len(rows), 0), dtype=torch.int64)
        beam.begin(*self._ranked(draft, states + embedded, everyone, no_paths))
        for step in range(1, levels):
            which = np.flatnonzero(request.depths > step)
            going_on = torch.from_numpy(which)
            before = states[going_on].repeat_interleave(width, dim=0)
            mixed = before + self._embedding(beam.tokens(going_on))
            paths = beam.paths(going_on)
            beam.grow(going_on, *self._ranked(draft, mixed, np.repeat(which, width), paths))
        tree = beam.tree().select(request.depths * width, request.depths)
        step_ms = (time.perf_counter() - started) * 1000 / levels
        runtime.profiler.record_forward(self.name, len(rows) * width, 0.0, step_ms, levels)
        return DraftResult.without_logits(tree)

    def _ranked(
        self, draft: GroupDraft, states: Tensor, which: Ints, paths: Tensor
    ) -> tuple[Tensor, Tensor]:
        request, runtime, step = draft.request, self._runtime, paths.shape[1]
        contexts = Contexts(
            rows=request.rows[which],
            positions=request.output_positions[which] + step,
            depths=np.full(len(which), step),
            paths=paths,
        )
        logits = self._output(states)[:, : runtime.pool.vocab_size]
        return runtime.sampler.rank(logits, contexts, request.width)


def settings_of(paths: dict[str, Path], source: str = f"drafter:{__name__}:ToyHead") -> Any:
    pool = pool_settings(paths)
    pool["models"].append({"name": "head", "source": source})
    engine = {"max_requests": 8, "max_model_len": 128, "prefill_chunk": 32}
    return {"pool": pool, "engine": engine}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_family(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def router(paths: dict[str, Path]) -> Iterator[ChainRouter]:
    with ChainRouter.from_config(settings_of(paths)) as router:
        yield router


@pytest.fixture(scope="module")
def cases(router: ChainRouter) -> list[Case]:
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(0, 320, rng.integers(1, 50)).tolist()) for _ in range(REQUESTS)]
    params = [greedy_params, seeded_params]
    oracle = open_oracle(router, "float64")
    return make_cases(oracle, prompts, lambda index: params[index % 2](index // 2, NEW_TOKENS))


def head_of(router: ChainRouter) -> ToyHead:
    head = router._thread.engine._executor._drafters["head"]
    assert isinstance(head, ToyHead)
    return head


def test_tokens_are_the_oracles_in_every_mode(router: ChainRouter, cases: list[Case]) -> None:
    for index, mode in enumerate(modes_of(router)):
        depth, width = (None, None) if isinstance(mode, str) else (4, 1 + index % 3)
        row = Arrangement(mode=mode, batch=8, depth=depth, width=width)
        result = compare(router, cases, row)
        assert not all_divergences([result]), row
        if mode == PAIR:
            assert result.speculated > result.cycles / 2, "it hardly drafted"
    assert_whole(router)
    assert not any(router.instruments.engine_state().control_faults.values())


@pytest.mark.exact
def test_tokens_are_the_oracles_over_the_covering_array(
    router: ChainRouter, cases: list[Case]
) -> None:
    for row in covering_array(modes_of(router)):
        assert not all_divergences([compare(router, cases, row)]), row
    assert_whole(router)


def test_each_committed_token_is_heard_once_with_what_the_target_made_of_it(
    router: ChainRouter,
) -> None:
    prompt = [*range(5, 75)]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, prefix_cache=False)
    [output] = router.generate([prompt], params, Speculation(PAIR, depth=3, width=2))
    heard = max(head_of(router).heard.values(), key=len)
    text = [*prompt, *output.token_ids]
    assert [position for position, *_ in heard] == [*range(len(heard))]
    assert [token for _, token, _ in heard] == text[: len(heard)]
    assert len(heard) > len(prompt) + 1, "the last pass is never asked for"
    path = router.pool.path("target")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.inference_mode():
        asked = torch.tensor([text])
        states = model(asked, output_hidden_states=True, use_cache=False).hidden_states
    for position, _, own in heard:
        for layer, state in zip(ToyHead.hidden, own, strict=True):
            torch.testing.assert_close(state, states[layer][0, position], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["draft", "feed", "lag", "open"])
def test_a_head_that_fails_costs_its_drafts_alone(
    paths: dict[str, Path], cases: list[Case], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a router of its own, where it rests afterwards."""
    settings = settings_of(paths)
    models = settings["pool"]["models"]
    models.insert(0, models.pop())  # the first that hears of anything
    models.append({"name": "suffix", "source": "suffix"})
    monkeypatch.setattr(ToyHead, name, lambda *_: 1 / 0)
    chains = (PAIR, OTHERS, ("suffix", "target"))
    with ChainRouter.from_config(settings) as router:
        outputs = router.generate(
            [one.prompt for one in cases[:6]],
            [one.params for one in cases[:6]],
            [Speculation(chain, depth=3) for chain in chains] * 2,
        )
        assert router.is_healthy
    for case, output, chain in zip(cases, outputs, chains * 2, strict=False):
        assert output.token_ids == list(case.reference)
        drafted = output.metrics.chains.get(chain, 0) / sum(output.metrics.chains.values())
        assert (drafted < 0.5) == (chain == PAIR), "it rests, and no other"


def test_hidden_states_that_the_target_does_not_tell_are_refused_at_the_start(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyHead, "hidden", (1, 99))
    reason = r"pool\.models\[target\]: it has no hidden states of \[1, 99\], which a drafter"
    with pytest.raises(ConfigError, match=reason):
        ChainRouter.from_config(settings_of(paths))


class Silent(Drafter):
    """Lacks `draft`."""


@pytest.mark.parametrize(
    "address",
    ["no_module:Head", *(f"{__name__}:{name}" for name in ("NoHead", "PAIR", "Silent"))],
)
def test_a_source_that_names_no_drafter_is_refused(paths: dict[str, Path], address: str) -> None:
    with pytest.raises(ConfigError, match=r"pool\.models\[3\]\.source"):
        ChainRouter.from_config(settings_of(paths, f"drafter:{address}"))
