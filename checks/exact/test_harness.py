"""The checks themselves: they must accept what is right and notice what is wrong."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from checks.exact import noise, seeded
from checks.exact.arrangement import (
    SELECTIONS,
    Arrangement,
    Mixed,
    Mode,
    Routed,
    chains,
    longest_chain,
)
from checks.exact.array_check import is_honest, turns_of
from checks.exact.chi_square import fit_p_value, independence_p_value
from checks.exact.comparison import first_difference
from checks.exact.covering_array import covering_array, pairs_of
from checks.exact.greedy import greedy_params
from checks.exact.models import SAVERS, pool_settings, save_family
from checks.exact.oracle import Choice, Oracle, cut_distance, process
from checks.exact.seeded import seeded_params
from checks.exact.settings import COUNT, TEMPERATURES, edits, warpers
from checks.exact.structures import STRUCTURES
from specrouter import ChainRouter, SamplingParams
from specrouter.config.policies import ADMISSION_POLICIES
from tests.modelpool.factories import VOCAB_SIZE

CHAINS: list[Mode] = [("a", "t"), ("b", "t"), ("a", "b", "t")]
TREES: list[Mode] = [*CHAINS, Routed("paper"), Routed("static", ("a", "b", "t"))]
SHAPELESS: list[Mode] = [
    "off",
    "adaptive",
    Routed("adaptive"),
    Routed("target-only"),
    Mixed(("off", None), Routed("adaptive")),
]
MODES = [*SHAPELESS, *TREES]
PROMPT = (5, 6, 7, 8)
ENDLESS = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    found = dict[str, Oracle]()
    for architecture in SAVERS:
        path = save_family(tmp_path_factory.mktemp(architecture), architecture)["target"]
        found[architecture] = Oracle(
            path, "float64", vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([0])
        )
    return found


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


# Arrangements


def test_every_two_settings_that_can_meet_do_meet_in_a_row() -> None:
    settings: dict[str, Sequence[object]] = {
        "mode": MODES,
        "batch": (1, 4, 16),
        "depth": (1, 4, 7),
        "width": (1, 2, 4),
        "urgent": (True, False),
        "admission": ADMISSION_POLICIES.names,
        "cached": (True, False),
        "weights": ("auto", "int8"),
    }
    rows = covering_array(MODES, weights=("auto", "int8"))
    covered = {frozenset(pair) for row in rows for pair in pairs_of(row)}
    for (name, values), (other, others) in itertools.combinations(settings.items(), 2):
        for value, beside in itertools.product(values, others):
            has_no_tree = value in SHAPELESS and other in ("depth", "width")
            assert ({(name, value), (other, beside)} in covered) != has_no_tree
    assert {str(row).endswith("weights int8") for row in rows} == {True, False}


def test_policies_that_choose_nodes_meet_every_selection() -> None:
    rows = covering_array(MODES)
    covered = {pair for row in rows for pair in pairs_of(row)}
    open_modes = {row.mode for row in rows if row.trees}
    assert open_modes == {Routed("adaptive"), TREES[-1], SHAPELESS[-1]}
    for mode, selection in itertools.product(open_modes, SELECTIONS):
        assert (("mode", mode), ("selection", selection)) in covered
    assert {"goodput", "adaserve", "adaserve-as-decided", "specinfer"} < set(SELECTIONS)
    budgeted = {dict(row.trees)["selection"] for row in rows if "budget_tokens" in dict(row.trees)}
    assert budgeted == {"adaserve", "adaserve-as-decided", "global-greedy", "equal-greedy"}


def test_requests_that_are_served_alone_come_in_turn_under_every_arrangement() -> None:
    rows = covering_array(MODES)
    turns = turns_of(16, rows, 4)
    alone = [which for row, which in zip(rows, turns, strict=True) if row.batch == 1]
    assert all(len(which) == 4 for which in alone)
    assert Counter(itertools.chain(*alone[:4])) == dict.fromkeys(range(16), 1)
    assert {len(w) for row, w in zip(rows, turns, strict=True) if row.batch > 1} == {16}
    assert all(turns_of(2, rows, 4)), "each serves one at least"


def test_a_policy_lasts_as_long_as_its_arrangement(small_family: dict[str, Path]) -> None:
    pool = pool_settings(small_family)
    pool["models"].append({"name": "ngram", "source": "ngram"})
    engine = {"max_requests": 8, "max_model_len": 64, "prefill_chunk": 16, "preload": False}
    with ChainRouter.from_config({"pool": pool, "engine": engine}) as router:
        static = Arrangement(mode=Routed("static", longest_chain(router)), batch=1, depth=2)
        with static.routing(router):
            inside = router.generate([PROMPT], ENDLESS)[0]
            depths = {record.decision.shape.depth for record in router.instruments.decisions()}
        assert depths == {2}
        assert ("ngram", "small", "middle", "target") in inside.metrics.chains
        outside = router.instruments.decisions()
        assert not any(record.decision.shape.depth == 2 for record in outside)


def test_chains_strictly_grow_and_what_has_no_weights_stands_first() -> None:
    sizes = {"ngram": 0, "code": 1, "math": 1, "target": 8}
    assert chains(list(sizes), "target", sizes.__getitem__) == [
        *((name, "target") for name in ("ngram", "code", "math")),
        *(("ngram", name, "target") for name in ("code", "math")),
    ]


def test_every_pair_of_options_meets_and_does_not() -> None:
    options = [{*warpers(i), *edits(i, 8)} - {"temperature", "stop_token_ids"} for i in range(6)]
    names = set.union(*options)
    assert len(names) == 10
    for one, other in itertools.combinations(names, 2):
        assert {(one in chosen, other in chosen) for chosen in options} == {
            *itertools.product((True, False), repeat=2)
        }
    for name, temperature in itertools.product(names, TEMPERATURES):
        chosen = [i for i in range(COUNT) if warpers(i)["temperature"] == temperature]
        assert {name in {*warpers(i), *edits(i, 8)} for i in chosen} == {True, False}


def test_a_quarter_of_the_requests_have_structures_and_the_others_all_settings() -> None:
    for params_of in (greedy_params, seeded_params):
        params = [params_of(index, 8) for index in range(2 * COUNT * 4 // 3)]
        formed = [one.structure for one in params if one.structure is not None]
        assert len(formed) == len(params) // 4
        assert set(formed) == set(STRUCTURES)
        assert not any(one.min_tokens for one in params if one.structure is not None)
    plain = [one for one in params if one.structure is None]
    assert [one.temperature for one in plain] == [
        warpers(turn)["temperature"] for turn in range(2 * COUNT)
    ]
    assert {one.ignore_eos for one in plain} == {True, False}


# Oracle


@pytest.mark.parametrize("architecture", SAVERS)
def test_steps_of_the_oracle_equal_generate(oracles: dict[str, Oracle], architecture: str) -> None:
    oracle = oracles[architecture]
    stepped = tuple(choice.token for choice in oracle.choices(PROMPT, ENDLESS))
    assert stepped == oracle.generate(PROMPT, ENDLESS)
    assert len(set(stepped)) > 5, "a model that repeats itself tests little"


def test_a_choice_after_a_prefix_is_the_choice_made_on_the_way(oracles: dict[str, Oracle]) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
    tokens = oracles["qwen3"].tokens(PROMPT, params)
    for position, token in enumerate(tokens):
        choice = oracles["qwen3"].choice_after(PROMPT, tokens[:position], params)
        assert choice.token == token


def test_margin_of_a_cut_token_is_its_distance_from_the_cut() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0 - 1e-6, -3.0], dtype=torch.float64)
    params = SamplingParams(temperature=1.0, top_k=2, seed=0)
    scores = process(logits.unsqueeze(0), params)[0]
    choice = Choice(0, logits, scores, params)
    assert scores[2] == -torch.inf
    assert choice.margin(2) == pytest.approx(1e-6)
    assert choice.margin(3) > 0.9


def test_cut_distance_of_top_p_is_in_probability() -> None:
    logits = torch.tensor([0.6, 0.2999, 0.1001], dtype=torch.float64).log()
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    assert cut_distance(logits, params, 2) == pytest.approx(0.0001)
    assert cut_distance(logits, params, 1) == pytest.approx(0.3)


# Comparison


@pytest.mark.parametrize(
    ("got", "expected", "position"),
    [((1, 2), (1, 2), None), ((1, 3), (1, 2), 1), ((1,), (1, 2), 1), ((1, 2, 3), (1, 2), 2)],
)
def test_first_difference(
    got: tuple[int, ...], expected: tuple[int, ...], position: int | None
) -> None:
    assert first_difference(got, expected) == position


def test_only_float32_excuses_differences_that_are_rare_and_narrow() -> None:
    assert is_honest("float64", 10, [])
    assert not is_honest("float64", 10**9, [1e-12])
    assert is_honest("float32", 100_000, [1e-5])
    assert not is_honest("float32", 100_000, [1e-5, 1e-5])
    assert not is_honest("float32", 99_999, [1e-5])
    assert not is_honest("float32", 100_000, [1e-3])


# Statistics


def test_chi_square_accepts_draws_from_the_distribution(rng: np.random.Generator) -> None:
    p = rng.dirichlet(np.full(300, 0.2))
    p_values = [fit_p_value(rng.multinomial(20_000, p), p) for _ in range(200)]
    assert min(p_values) > 1e-4
    assert 0.4 < float(np.mean(p_values)) < 0.6


def test_chi_square_notices_a_slightly_other_distribution(rng: np.random.Generator) -> None:
    p = rng.dirichlet(np.full(300, 0.2))
    tempered = p**0.9 / (p**0.9).sum()
    assert fit_p_value(rng.multinomial(20_000, tempered), p) < 0.001


def test_chi_square_notices_the_impossible() -> None:
    assert fit_p_value(np.array([1000, 1]), np.array([1.0, 0.0])) == 0.0


def test_independence_notices_shared_noise(rng: np.random.Generator) -> None:
    p, q = rng.dirichlet(np.full(50, 0.5), size=2)
    drawn = rng.gumbel(size=(20_000, 50))
    first, second = (drawn + np.log(p)).argmax(1), (drawn + np.log(q)).argmax(1)
    assert independence_p_value(first, second, p, q) < 1e-6
    fresh = (rng.gumbel(size=(20_000, 50)) + np.log(q)).argmax(1)
    assert independence_p_value(first, fresh, p, q) > 0.001


def _keyed_by_sum(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed + position).gumbel(size=vocab_size)


def _keyed_by_low_bits(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    return np.random.default_rng([seed % 2**32, position]).gumbel(size=vocab_size)


@pytest.mark.parametrize("faulty", [_keyed_by_sum, _keyed_by_low_bits])
def test_noise_with_structure_is_noticed(monkeypatch: pytest.MonkeyPatch, faulty: object) -> None:
    monkeypatch.setattr(noise, "gumbel", faulty)
    assert min(noise.noise_p_values(1500).values()) == 0.0


def test_the_noise_is_gumbel_and_without_structure() -> None:
    p_values = noise.noise_p_values(3000)
    assert min(p_values.values()) > 0.001 / len(p_values)


def test_only_a_target_in_int8_is_checked_in_bfloat16() -> None:
    with pytest.raises(SystemExit, match="goes with --weights int8"):
        seeded.main(["--dtypes", "bfloat16", "--weights", "auto"])
