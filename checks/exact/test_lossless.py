"""Small versions of the exactness checks, on random models in float64.

`make exact` runs the long ones, on the bundled pool.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from checks.exact import prefix
from checks.exact.arguments import open_oracle
from checks.exact.arrangement import (
    OBJECTIVES,
    SELECTIONS,
    Arrangement,
    Mixed,
    Routed,
    modes_of,
    policies_of,
)
from checks.exact.array_check import make_cases, turns_of
from checks.exact.comparison import Case, all_divergences, compare, resume
from checks.exact.covering_array import covering_array
from checks.exact.distribution import failed_tests, open_small_router, stream_p_values
from checks.exact.faults import Family, FaultCheck
from checks.exact.oracle import Oracle
from checks.exact.report import Progress
from specrouter import ChainRouter, SamplingParams
from statemgr.recurrent_store import RecurrentPass
from test_support.factories import HYBRID, HYBRIDS
from test_support.families import NAMES, SAVERS, pool_settings, save_family
from test_support.params import COUNT, greedy_params, seeded_params
from test_support.routers import assert_whole

NEW_TOKENS = 12
REQUESTS = COUNT + 6  # each sampled setting once, the others greedy
WIDTHS = (1, 3)
GATED = "qwen3.5"
TWO = pytest.mark.parametrize("served", ["llama", HYBRID], indirect=True)
LLAMA = pytest.mark.parametrize("served", ["llama"], indirect=True)
EXACT = pytest.mark.exact


@dataclasses.dataclass(frozen=True)
class Served:
    architecture: str
    router: ChainRouter
    oracle: Oracle
    cases: list[Case]


# The others, which differ less from these, are served by `make exact`.
FEW = ("llama", HYBRID)
ARCHITECTURES = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.exact) for name in SAVERS
]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A router over a family of each architecture, and requests with their references."""
    paths = save_family(tmp_path_factory.mktemp(request.param), request.param)
    engine = {"max_requests": 8, "max_model_len": 128, "prefill_chunk": 64, "preload": False}
    pool = pool_settings(paths)
    pool["models"].append({"name": "ngram", "source": "ngram"})
    settings = {"pool": pool, "engine": engine}
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(0, 320, rng.integers(1, 50)).tolist()) for _ in range(REQUESTS)]
    with ChainRouter.from_config(settings) as router:
        oracle = open_oracle(router, "float64")
        yield Served(request.param, router, oracle, make_cases(oracle, prompts, _params))


def _params(index: int) -> SamplingParams:
    if index < COUNT:
        return dataclasses.replace(seeded_params(index, NEW_TOKENS), seed=2**64 - 1 - index)
    return greedy_params(index - COUNT, NEW_TOKENS)


def test_tokens_are_the_oracles_under_every_arrangement(served: Served) -> None:
    modes = list(enumerate(modes_of(served.router)))
    number = list(SAVERS).index(served.architecture)
    # The first architecture takes every mode, the others every second one in turn.
    for index, mode in modes if number == 0 else modes[number % 2 :: 2]:
        depth, width = (None, None) if isinstance(mode, str) else (5, WIDTHS[index % 2])
        row = Arrangement(mode=mode, batch=8, depth=depth, width=width, urgent=index // 2 % 2 == 0)
        result = compare(served.router, served.cases, row)
        assert not all_divergences([result]), row
        if isinstance(row.mode, tuple) and "ngram" not in row.mode:
            assert result.speculated > result.cycles / 2, f"{row} hardly speculated"
    assert_whole(served.router)


@TWO
def test_a_request_resumed_after_any_token_ends_alike(served: Served) -> None:
    longest = max(served.cases, key=lambda case: len(case.reference))
    for position in range(len(longest.reference)):
        prefix = longest.reference[:position]
        output = resume(served.router, longest, prefix, Arrangement(mode="adaptive", batch=1))
        assert tuple(output.token_ids) == longest.reference


@LLAMA
def test_generate_takes_a_setting_per_prompt(served: Served) -> None:
    outputs = served.router.generate(
        [case.prompt for case in served.cases],
        [case.params for case in served.cases],
        speculation=[row.speculation for row in _rows(served)],
        slo=[OBJECTIVES[index % len(OBJECTIVES)] for index in range(REQUESTS)],
    )
    assert [tuple(output.token_ids) for output in outputs] == [
        case.reference for case in served.cases
    ]


@TWO
def test_drafters_save_cycles_of_the_target(served: Served) -> None:
    chain = Arrangement(mode=served.router.pool.names[-2:], batch=8, depth=4)
    result = compare(served.router, served.cases, chain)
    assert result.cycles < 0.9 * result.tokens


@LLAMA
@pytest.mark.parametrize(
    "policy",
    ["paper", pytest.param("static", marks=EXACT), pytest.param("target-only", marks=EXACT)],
)
def test_no_policy_changes_a_token(policy: str, served: Served) -> None:
    chain = list(served.router.pool.names) if policy == "static" else None
    settings = served.router.config.model_dump()
    settings["scheduler"].update(policy=policy, chain=chain)
    whole_chain = Arrangement(mode=served.router.pool.names, batch=4, depth=4)
    with ChainRouter.from_config(settings) as router:
        results = [
            compare(router, served.cases, row)
            for row in (whole_chain, Arrangement(mode="adaptive", batch=4))
        ]
        assert_whole(router)
    assert not all_divergences(results)
    assert results[0].speculated > 0
    if policy != "paper":  # which may find that models of so similar a cost do not pay
        assert (results[1].speculated > 0) == (policy == "static")


@LLAMA
def test_no_token_depends_on_when_drafters_read_their_prompts(served: Served) -> None:
    settings = served.router.config.model_dump()
    settings["engine"]["prefill_chunk"] = 5
    mixed = next(mode for mode in policies_of(served.router) if isinstance(mode, Mixed))
    rows = (
        Arrangement(mode=("small", "target"), batch=8, depth=3, width=WIDTHS[0], urgent=True),
        Arrangement(mode=NAMES, batch=8, depth=3, width=WIDTHS[1]),
        Arrangement(mode=mixed, batch=8, urgent=True),
        Arrangement(mode="adaptive", batch=8),
    )
    with ChainRouter.from_config(settings) as router:
        for row in rows:
            result = compare(router, served.cases, row)
            assert not all_divergences([result]), row
            if isinstance(row.mode, tuple):  # long prompts end before their drafter has read them
                assert 0 < result.speculated < result.cycles
        assert_whole(router)


@LLAMA
def test_no_selection_changes_a_token_of_requests_with_objectives(served: Served) -> None:
    chains = itertools.cycle((("middle", "target"), NAMES))
    for selection, chain in zip(SELECTIONS, chains, strict=False):
        row = Arrangement(
            mode=Routed("static", chain),
            batch=8,
            depth=4,
            width=3,
            urgent=True,
            trees=(("selection", selection), ("budget_tokens", 40)),
        )
        result = compare(served.router, served.cases, row)
        assert not all_divergences([result]), row
        assert result.speculated > result.cycles / 2, f"{row} hardly speculated"
        assert result.cycles < 0.95 * result.tokens, f"{row} accepted next to nothing"
        attained, missed = result.attained
        assert attained > 0, "one token a second is what every request can have"
        assert missed > 0, "a token a microsecond is what none can have"
    assert_whole(served.router)


@LLAMA
def test_requests_that_differ_in_chains_and_objectives_share_a_batch(served: Served) -> None:
    mixed = [mode for mode in policies_of(served.router) if isinstance(mode, Mixed)]
    for selection, mode in zip(SELECTIONS, itertools.cycle(mixed[:2]), strict=False):
        trees = (("selection", selection), ("budget_tokens", 24))
        row = Arrangement(mode=mode, batch=8, urgent=True, trees=trees)
        result = compare(served.router, served.cases, row)
        assert not all_divergences([result]), row
        assert result.speculated > 0
    assert_whole(served.router)


def test_the_longest_path_of_any_shape_keeps_its_tokens(tmp_path: Path) -> None:
    """Models that nearly always agree, so that every draft is accepted as a whole."""
    pool = pool_settings(save_family(tmp_path, noise=0.002))
    engine = {"max_requests": 2, "max_model_len": 128, "preload": False}
    with ChainRouter.from_config({"pool": pool, "engine": engine}) as router:
        oracle = open_oracle(router, "float64")
        prompts = [(17, 230, 41 + index) for index in range(2)]
        cases = make_cases(oracle, prompts, _long_params)
        for selection in ("whole", "adaserve", "specinfer"):
            trees = (("selection", selection), ("budget_tokens", 200))
            mode = Routed("static", NAMES)
            row = Arrangement(mode=mode, batch=1, depth=4, width=4, trees=trees)
            result = compare(router, cases, row)
            assert not all_divergences([result]), row
            assert result.cycles < 0.6 * result.tokens, f"{row}: paths are short"


def test_places_that_a_beam_leaves_empty_are_no_tokens(small_config: dict[str, Any]) -> None:
    """A static tree is wider than its first level: what pads it is id 0, here a likely choice."""
    row = Arrangement(mode=Routed("static", NAMES), batch=4, trees=(("selection", "specinfer"),))
    with ChainRouter.from_config(small_config) as router:
        oracle = open_oracle(router, "float64")
        prompts = [(17, 230, 41 + index) for index in range(4)]
        cases = make_cases(oracle, prompts, _padding_params)
        chosen = [token for case in cases for token in case.reference]
        assert 0.02 < chosen.count(0) / len(chosen) < 0.9
        assert not all_divergences([compare(router, cases, row)])
        assert_whole(router)


def _padding_params(index: int) -> SamplingParams:
    return dataclasses.replace(_long_params(index), logit_bias={0: 2.0 + index})


def _long_params(index: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=60, temperature=index % 2, seed=index, ignore_eos=True)


@pytest.mark.exact
def test_tokens_follow_the_processed_distribution(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.9, top_k=40, top_p=0.95)
    progress = Progress("distribution", 2000)
    with open_small_router(tmp_path) as router:
        oracle = open_oracle(router, "float64")
        p_values, accepted = stream_p_values(router, oracle, params, 1000, progress)
    assert not failed_tests(p_values)
    assert accepted > 1.1, "the tests mean little where no draft is accepted"


@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=EXACT), HYBRID])
def test_faults_never_change_an_output(architecture: str, tmp_path: Path) -> None:
    check = FaultCheck(seed=1, progress=Progress("faults", 20))
    family = Family(architecture, tmp_path)
    # `make exact` plays a thousand bursts, of every architecture.
    check.play_lifetime(family, 100 + list(SAVERS).index(architecture), bursts=4)
    assert not check.failures


@pytest.mark.exact
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("served", HYBRIDS, indirect=True)
def test_no_token_of_recurrent_layers_depends_on_batch_chain_or_width(
    batch: int, served: Served
) -> None:
    rows = [
        Arrangement(mode=chain, batch=batch, depth=4, width=width)
        for chain, width in itertools.product((("small", "target"), NAMES), WIDTHS)
    ]
    # Alone, when a token takes longest, each case is served in one of the rows.
    turns = turns_of(len(served.cases), rows, lone_share=len(rows))
    for row, which in zip(rows, turns, strict=True):
        result = compare(served.router, served.cases, row, which=which)
        assert not all_divergences([result]), row
        assert result.speculated > result.cycles / 2, f"{row} hardly speculated"
    assert_whole(served.router)


@pytest.mark.parametrize(
    ("recurrent", "width"),
    [(("small", "target"), 1), pytest.param(("middle",), 3, marks=EXACT)],
)
def test_models_with_and_without_recurrent_layers_serve_in_one_chain(
    recurrent: tuple[str, ...], width: int, tmp_path: Path
) -> None:
    kinds = {kind: save_family(tmp_path / kind, kind) for kind in (GATED, "llama")}
    paths = {name: kinds[GATED if name in recurrent else "llama"][name] for name in NAMES}
    engine = {"max_requests": 4, "max_model_len": 128, "prefill_chunk": 16, "preload": False}
    with ChainRouter.from_config({"pool": pool_settings(paths), "engine": engine}) as router:
        prompts = [tuple(range(17, 20 + 9 * index)) for index in range(6)]
        cases = make_cases(open_oracle(router, "float64"), prompts, _params)
        row = Arrangement(mode=NAMES, batch=4, depth=3, width=width)
        result = compare(router, cases, row)
        assert not all_divergences([result]), row
        assert result.speculated > 0
        assert_whole(router)


@pytest.mark.exact
@pytest.mark.parametrize("served", [HYBRID], indirect=True)
def test_forwards_that_fail_between_layers_change_no_token(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafters' and intermediates', with recurrent layers that have read on and others that have
    not."""
    usual, calls = RecurrentPass.scan, itertools.count(1)

    def scan(self: RecurrentPass, layer: int, *given: Any) -> Tensor:
        if layer == 2 and len(self._store.layers) == 2 and next(calls) % 5 == 0:
            raise RuntimeError("out of memory")
        return usual(self, layer, *given)

    monkeypatch.setattr(RecurrentPass, "scan", scan)
    settings = served.router.config.model_dump()
    with ChainRouter.from_config(settings) as router:
        for width in WIDTHS:
            row = Arrangement(mode=("small", "target"), batch=4, depth=3, width=width)
            assert not all_divergences([compare(router, served.cases, row)])
        assert_whole(router)
    assert next(calls) > 10


@pytest.mark.exact
def test_no_text_differs_where_recurrent_states_are_shared_preempted_and_lost(
    tmp_path: Path,
) -> None:
    figures, report = prefix.check(
        tmp_path, "float64", requests=20, losses=0.05, architecture=GATED
    )
    assert not figures.differing
    assert not figures.leaked
    assert not report["control_faults"]
    assert report["failures"] == 0
    assert report["hits"] > 5
    assert report["preemptions"] > 10


def _rows(served: Served) -> list[Arrangement]:
    rows = covering_array(modes_of(served.router), batches=(1,))
    return [rows[index % len(rows)] for index in range(len(served.cases))]
