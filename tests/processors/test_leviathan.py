"""Whoever drafts, through however many levels, tokens are draws from the target's distribution."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from processors.leviathan import accepted_lengths, emit
from processors.token_tree import Floats, Ints
from test_support.chi_square import fit_p_value

VOCAB = 6
DEPTH = 3
NEW = 3  # tokens whose joint distribution is looked at
ROWS = 30_000
LEAST_P = 1e-4

Rule = Callable[[Tensor, Tensor, Ints, Ints, Floats, Tensor], tuple[Ints, Ints]]


def reject(
    p: Tensor, q: Tensor, tokens: Ints, sizes: Ints, uniforms: Floats, noise: Tensor
) -> tuple[Ints, Ints]:
    """The rule with all distributions at hand: accepted nodes [B], and the token after them [B].

    `p`, `noise`: [sum(sizes + 1), V] after the root and after each node; `q`: [sum(sizes), V].
    """
    row, step = nodes_of(sizes)
    first, roots = np.cumsum(sizes) - sizes, np.cumsum(sizes + 1) - (sizes + 1)
    drafted = tokens[row, step]
    at_nodes = p.numpy()[roots[row] + step, drafted], q.numpy()[np.arange(len(row)), drafted]
    accepted, is_told = accepted_lengths(*at_nodes, sizes, uniforms)
    assert is_told.all()
    refused = torch.zeros((len(sizes), p.shape[1]), dtype=torch.float64)
    which = np.flatnonzero(accepted < sizes)
    refused[which] = q[(first + accepted)[which]]
    stop = roots + accepted
    emitted, scores = emit(p[stop], refused, noise[stop])
    assert scores.isfinite().all()
    return accepted, emitted.numpy()


@dataclass(frozen=True)
class Chain:
    """Markov models [V, V], weakest first: the next token's probabilities after each token."""

    models: tuple[Floats, ...]
    rule: Rule = reject
    hard: bool = False  # intermediates hand on their accepted nodes alone
    cut: str = ""  # drafts end before a flat "distribution", or (wrong) an improbable "token"

    def generate(self, seed: int) -> Ints:
        """[ROWS, NEW] tokens after token 0, with noise that each position has once for all."""
        drawn = np.random.default_rng(seed)
        span = NEW + DEPTH + len(self.models)
        uniforms = drawn.random((len(self.models), ROWS, span))
        noise = drawn.gumbel(size=(len(self.models), ROWS, span, VOCAB))
        text = np.zeros((ROWS, span + 1), dtype=np.int64)  # token 0, then the output
        counts = np.zeros(ROWS, dtype=np.int64)
        while len(rows := np.flatnonzero(counts < NEW)):
            done = counts[rows]
            last = text[rows, done]
            tokens = self._draft(last, noise[0, rows[:, None], done[:, None] + np.arange(DEPTH)])
            sizes = self._sizes(np.concatenate((last[:, None], tokens), axis=1))
            for level in range(1, len(self.models)):
                row, step = nodes_of(sizes)
                context_row, context = nodes_of(sizes + 1)
                before = np.concatenate((last[:, None], tokens), axis=1)
                accepted, emitted = self.rule(
                    torch.from_numpy(self.models[level][before[context_row, context]]),
                    torch.from_numpy(self.models[level - 1][before[row, step]]),
                    tokens,
                    sizes,
                    uniforms[level, rows[row], done[row] + step],
                    torch.from_numpy(noise[level, rows[context_row], done[context_row] + context]),
                )
                tokens = np.concatenate((tokens, np.zeros_like(tokens[:, :1])), axis=1)
                tokens[np.arange(len(rows)), accepted] = emitted
                hands_on_nodes_alone = self.hard and level < len(self.models) - 1
                sizes = accepted if hands_on_nodes_alone else accepted + 1
            row, step = nodes_of(sizes)
            text[rows[row], done[row] + step + 1] = tokens[row, step]
            counts[rows] += sizes
        return text[:, 1 : NEW + 1]

    def _draft(self, last: Ints, noise: Floats) -> Ints:
        """[n, DEPTH] draws from the weakest model."""
        tokens = [last]
        for step in range(DEPTH):
            with np.errstate(divide="ignore"):
                scores = np.log(self.models[0][tokens[-1]]) + noise[:, step]
            tokens.append(scores.argmax(axis=1))
        return np.stack(tokens[1:], axis=1)

    def _sizes(self, text: Ints) -> Ints:
        """How many nodes [n] go to the first verifier; text [n, 1 + DEPTH]."""
        drafter = self.models[0]
        values = {
            "": np.ones_like(text[:, 1:], dtype=np.float64),
            "distribution": drafter.max(axis=1)[text[:, :-1]],
            "token": drafter[text[:, :-1], text[:, 1:]],
        }[self.cut]
        sizes: Ints = np.cumprod(values > 0.4, axis=1).sum(axis=1)
        return sizes

    def p_value(self, seed: int) -> float:
        """The chance of joint counts at least this far from the target's."""
        target = self.models[-1]
        joint = np.einsum("a,ab,bc->abc", target[0], target, target).ravel()
        cells = self.generate(seed) @ np.array([VOCAB**2, VOCAB, 1])
        return fit_p_value(np.bincount(cells, minlength=VOCAB**3), joint)


def nodes_of(sizes: Ints) -> tuple[Ints, Ints]:
    """Row and step of each node, row after row."""
    row = np.repeat(np.arange(len(sizes)), sizes)
    return row, np.arange(len(row)) - (np.cumsum(sizes) - sizes)[row]


def random_models(count: int, holes: bool = False) -> tuple[Floats, ...]:
    """With holes: a third of the tokens are impossible, others in each model and context."""
    drawn = np.random.default_rng(7)
    weights = drawn.dirichlet(np.full(VOCAB, 0.8), size=(count, VOCAB)) + 0.01
    if holes:
        np.put_along_axis(weights, weights.argsort(axis=2)[:, :, : VOCAB // 3], 0.0, axis=2)
    return tuple(weights / weights.sum(axis=2, keepdims=True))


def reject_without_residual(
    p: Tensor, q: Tensor, tokens: Ints, sizes: Ints, uniforms: Floats, noise: Tensor
) -> tuple[Ints, Ints]:
    """A wrong rule: what replaces a rejected node is drawn from p."""
    accepted, _ = reject(p, q, tokens, sizes, uniforms, noise)
    stop = np.cumsum(sizes + 1) - (sizes + 1) + accepted
    return accepted, (p.log() + noise)[stop].argmax(dim=1).numpy()


def tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def random_noise(count: int, size: int = VOCAB) -> Tensor:
    return torch.from_numpy(np.random.default_rng(3).gumbel(size=(count, size)))


@pytest.mark.parametrize("levels", [2, 3, 4])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("cut", ["", "distribution"])
def test_a_chain_emits_draws_from_its_target(levels: int, holes: bool, cut: str) -> None:
    chain = Chain(random_models(levels, holes), cut=cut)
    assert chain.p_value(seed=levels) > LEAST_P


@pytest.mark.parametrize("levels", [2, 3])
def test_a_draw_from_the_verifier_in_place_of_the_residual_is_found_out(levels: int) -> None:
    chain = Chain(random_models(levels), reject_without_residual)
    assert chain.p_value(seed=levels) < LEAST_P


def test_hard_rejection_is_found_out() -> None:
    assert Chain(random_models(3), hard=True).p_value(seed=3) < LEAST_P


@pytest.mark.parametrize("levels", [2, 3])
def test_a_draft_that_is_cut_off_because_of_the_token_there_is_found_out(levels: int) -> None:
    assert Chain(random_models(levels), cut="token").p_value(seed=levels) < LEAST_P


def test_a_node_that_is_impossible_to_its_proposer_alone_is_accepted() -> None:
    p, q = tensor([0.5, 0.5, 0.0]), tensor([1.0, 0.0, 0.0])
    accepted, _ = reject(
        p.repeat(4, 1),
        q.repeat(2, 1),
        np.array([[1], [2]]),  # p 0.5 and p 0, both q 0
        np.array([1, 1]),
        np.array([0.999, 0.0]),
        random_noise(4, 3),
    )
    assert accepted.tolist() == [1, 0]


def test_a_proposer_that_equals_its_verifier_is_always_believed() -> None:
    drawn = np.random.default_rng(1)
    p = torch.from_numpy(drawn.dirichlet(np.full(VOCAB, 0.3), size=400))
    q = p.reshape(100, 4, VOCAB)[:, :3].reshape(-1, VOCAB)
    uniforms = np.full(300, np.nextafter(1.0, 0.0))
    tokens = (q.log() + random_noise(300)).argmax(dim=1).reshape(100, 3).numpy()
    noise = random_noise(400)
    accepted, emitted = reject(p, q, tokens, np.full(100, 3), uniforms, noise)
    assert (accepted == 3).all()
    assert np.array_equal(emitted, (p.log() + noise).argmax(dim=1)[3::4].numpy())


@pytest.mark.parametrize(
    ("p", "q", "emitted"),
    [
        ([0.5, 0.3, 0.2], [0.8, 0.1, 0.1], 1),  # what is left: 0, 0.2, 0.1
        ([0.2, 0.4, 0.4], [1.0, 0.0, 0.0], 1),  # of ties the lowest id
        ([0.0, 0.25, 0.75], [0.0, 0.25, 0.75], 2),  # nothing is left: as the verifier
        ([0.0, 0.0, 0.3, 0.7], [0.6, 0.4, 0.0, 0.0], 3),  # nothing in common: the same
    ],
)
def test_what_replaces_a_node_is_what_its_proposer_underrates(
    p: list[float], q: list[float], emitted: int
) -> None:
    noise = torch.zeros(2, len(p), dtype=torch.float64)
    # No number in [0, 1) accepts a node that is impossible to the verifier.
    args = np.array([[0]]), np.array([1]), np.array([0.9 if p[0] else 0.0])
    accepted, found = reject(tensor(p, p), tensor(q), *args, noise)
    assert (accepted.tolist(), found.tolist()) == ([0], [emitted])


@pytest.mark.parametrize("width", [0, 2])
def test_a_row_without_nodes_draws_from_its_verifier(width: int) -> None:
    p, noise = torch.full((4, VOCAB), 1 / VOCAB, dtype=torch.float64), random_noise(4)
    nothing = np.zeros((4, width), dtype=np.int64)
    sizes = np.zeros(4, dtype=np.int64)
    accepted, emitted = reject(p, p[:0], nothing, sizes, np.zeros(0), noise)
    assert accepted.tolist() == [0, 0, 0, 0]
    assert np.array_equal(emitted, noise.argmax(dim=1).numpy())
