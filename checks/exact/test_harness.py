"""The checks themselves: they must accept what is right and notice what is wrong."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from checks.exact import noise
from checks.exact.arrangement import (
    SELECTIONS,
    Mixed,
    Mode,
    Routed,
)
from checks.exact.array_check import is_honest
from checks.exact.covering_array import covering_array, pairs_of
from checks.exact.oracle import Oracle
from specrouter import SamplingParams
from specrouter.config.policies import ADMISSION_POLICIES
from test_support.chi_square import fit_p_value, independence_p_value
from test_support.factories import VOCAB_SIZE
from test_support.families import SAVERS, save_family

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


# Comparison


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
