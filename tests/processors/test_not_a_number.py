"""A value of the data plane that turns NaN ends its row, or costs drafts: it never makes a text.

Every function of `processors` whose result holds floats gives NaN, all of it or one number, at each
of its calls or at one. Choices and drafts are then those of a run without a fault, or are marked.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from processors.contexts import Contexts
from processors.pack import NO_SLOT, FedTree, PackResult, tree_contexts
from processors.sampler import Sampler
from processors.sampling_row import SamplingSettings
from processors.shared_noise import accept
from processors.token_tree import TokenTree
from processors.verify import _places
from processors.verify_result import VerifierForward, VerifyResult
from test_support.function_faults import Fault, Target, functions_in, without_numbers
from tests.pairwise import pairwise
from tests.processors.verification import path_tree

pytestmark = pytest.mark.slow

VOCAB = 700  # whole blocks and a rest
DEPTH, WIDTH, POSITION = 3, 3, 4
HOST = torch.device("cpu")
PROMPT = (3, 4, 5, 6)
EDITED = SamplingSettings(
    temperature=0.7,
    top_k=20,
    top_p=0.9,
    seed=5,
    min_p=0.02,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=((7, 2.0), (9, -2.0)),
    bad_words_ids=((8,), (7, 8)),
)
PACKS = {
    "greedy": [SamplingSettings()] * 2,
    "sampled": [SamplingSettings(temperature=0.8, seed=seed) for seed in range(3)],
    "limited": [
        SamplingSettings(temperature=0.9, top_k=5, seed=1),
        SamplingSettings(temperature=0.9, top_p=0.3, seed=2),
        SamplingSettings(temperature=1.0, min_p=0.4, seed=3),
    ],
    "mixed": [
        SamplingSettings(),
        SamplingSettings(temperature=1.0, seed=4),
        SamplingSettings(temperature=0.9, top_k=40, top_p=0.95, seed=6),
        EDITED,
    ],
}
LAST_CALL = 2  # that may be the only one with a fault


def one_missing(value: Any) -> Any:
    """As `without_numbers`, but of arrays only the last number."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size:
        changed = value.copy()
        changed.flat[-1] = math.nan
        return changed
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.numel():
        tensor = value.clone()
        tensor.view(-1)[-1] = math.nan
        return tensor
    if type(value) is tuple:
        return tuple(map(one_missing, value))
    return without_numbers(value)


SPOILERS: dict[str, Callable[[Any], Any]] = {"whole": without_numbers, "one": one_missing}


@dataclass(frozen=True, eq=False)
class Case:
    """Rows, of which each has a draft of `DEPTH` tokens that were drawn by another model."""

    settings: list[SamplingSettings]
    tree: TokenTree
    logits: torch.Tensor  # [n, V] after roots and nodes
    drafted: torch.Tensor  # [n, V] of the drafter

    @classmethod
    def of(cls, settings: list[SamplingSettings]) -> "Case":
        rows = len(settings)
        drawn = torch.Generator().manual_seed(rows)
        size = (rows * (DEPTH + 1), VOCAB)
        logits = 3 * torch.randn(size, generator=drawn, dtype=torch.float64)
        drafted = logits + torch.randn(size, generator=drawn, dtype=torch.float64)
        best = drafted.argmax(dim=1).view(rows, DEPTH + 1)
        tree = path_tree({row: best[row, :DEPTH].tolist() for row in range(rows)})
        return cls(settings, tree, logits, drafted)

    def opened(self) -> tuple[Sampler, Contexts]:
        sampler = Sampler(VOCAB, window=16)
        for row, one in enumerate(self.settings):
            sampler.open(row, one, PROMPT, (7,) * POSITION)
        positions = np.full(len(self.settings), POSITION)
        return sampler, tree_contexts(sampler, self.tree, positions, HOST)

    def judged(self) -> VerifyResult:
        sampler, contexts = self.opened()
        fed = FedTree(self.tree, np.full(self.tree.tokens.shape, NO_SLOT))
        pack = PackResult(self.logits, fed, self.logits[:0])
        forward = VerifierForward(self.tree, _places(self.tree), contexts, pack, {})
        return accept(sampler, forward, rescore=False)

    def ranked(self) -> tuple[torch.Tensor, torch.Tensor]:
        sampler, contexts = self.opened()
        return sampler.rank(self.drafted, contexts, WIDTH)


@cache
def having_floats() -> list[Target]:
    """The functions that cases call and whose results hold any."""
    found = list[Target]()

    def note(target: Target, value: Any) -> Any:
        if target not in found and without_numbers(value) is not value:
            found.append(target)
        return value

    with ExitStack() as stack:
        for one in functions_in(["processors"]):
            stack.enter_context(Fault(one, "nan", spoil=partial(note, one)).armed())
        for case, many in itertools.product(map(Case.of, PACKS.values()), (False, True)):
            with many_ids(many):
                case.judged()
                case.ranked()
    return found


def spoilt(run: Callable[[], Any], spoil: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    """Results of `run` with one fault each, and what they are called; None where it raised."""
    for target in having_floats():
        fault = Fault(target, "nan", spoil=spoil)
        with fault.armed():
            for fault.only in (None, *range(1, LAST_CALL + 1)):
                fault.calls = fault.fired = 0
                try:
                    result = run()
                except Exception:  # ends the rows that it is about
                    result = None
                if not fault.fired:
                    break
                yield f"{target.name}, call {fault.only or 'any'}", result


@contextmanager
def many_ids(many: bool) -> Iterator[None]:
    """Rows are cut and perturbed as with a large vocabulary, which has ways of its own."""
    least = VOCAB if many else 2**15
    with (
        mock.patch("processors.logits._MANY", least),
        mock.patch("processors.row_noise._MANY", least),
    ):
        yield


@pytest.fixture
def _many_ids(many: bool) -> Iterator[None]:
    with many_ids(many):
        yield


def cases() -> pytest.MarkDecorator:
    """Every two of packs, spoilers, sizes of the vocabulary meet."""
    made = pairwise(pack=list(PACKS), spoiler=list(SPOILERS), many=[False, True])
    return pytest.mark.parametrize(list(made[0]), [tuple(case.values()) for case in made])


@cases()
@pytest.mark.usefixtures("_many_ids")
def test_what_is_emitted_is_right_or_ends_its_row(pack: str, spoiler: str) -> None:
    case, settings = Case.of(PACKS[pack]), PACKS[pack]
    wanted = case.judged()
    assert wanted.sound.all()
    wrong, ended = [], 0
    for name, result in spoilt(case.judged, SPOILERS[spoiler]):
        if result is None:
            ended += 1
            continue
        ended += not result.sound.all()
        for row in range(len(settings)):
            made = result.path(row)
            if not result.sound[row]:
                made = made[: result.sound_length(row)]
            if made.tolist() != wanted.path(row).tolist()[: len(made)] or (
                result.sound[row] and len(made) != len(wanted.path(row))
            ):
                wrong.append(f"{name}: row {row}")
    assert wrong == []
    assert ended


@cases()
@pytest.mark.usefixtures("_many_ids")
def test_drafts_that_are_no_numbers_are_known(pack: str, spoiler: str) -> None:
    """Others need not be right: the verifier compares them with its own."""
    case, found = Case.of(PACKS[pack]), 0
    for name, result in spoilt(case.ranked, SPOILERS[spoiler]):
        if result is None:
            continue
        ids, log_probs = result
        assert ((ids >= 0) & (ids < VOCAB)).all(), name
        found += bool(log_probs.isnan().any())
    assert found
