"""The dynamic program: the largest set of new requests whose prompts are read by their deadlines.

`best[i][m, n]` is the largest prefill budget that is left at the deadline of prompt i, if that is
the last one admitted so far, `m` units of memory are taken and `n` new requests of each tier are
admitted; -inf where that cannot be. A prompt that was begun is never left out.

    best[i][m, n] = max over j < i of best[j][m - m_i, n - 1] + PB*(deadline_i - deadline_j) - p_i

Of equally large sets, the one that leaves most budget is taken.
Pure, on arrays. Source: SLOs-Serve (arXiv 2504.08784), section 3.2.1 and Appendix C, Equation 5.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from research.policies.prefill_budget import PrefillBudget
from specrouter.slo.serve.load import Load, Prompt
from specrouter.slo.serve.pacing import Memory

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
BudgetOf = Callable[[tuple[float, ...]], PrefillBudget]  # by the tiers' TPOTs

_ROUNDING = 1e-9
_TIERS = 3  # finite TPOTs that the dynamic program distinguishes
_GRID = 1.05  # ratio of the TPOTs that are distinguished, if there are more
MOST_NEW = 10  # new requests that one decision considers
_UNITS = 48  # units of memory in a decision


@dataclass(frozen=True)
class PromptDemand:
    """A request whose prompt has to be read.

    Attributes:
        deadline_ms: time left until its deadline.
        tokens: unread prompt tokens, with the one that brings the first token.
        tier: tier in which it decodes afterwards.
        memory: units that it needs; 0 if it has them.
        is_running: it was admitted before.
    """

    deadline_ms: float
    tokens: int
    tier: int
    memory: int = 0
    is_running: bool = False


@dataclass(frozen=True)
class Room:
    """The decoding requests, and the resources for new ones.

    Attributes:
        decoding: [L] requests of each tier.
        memory: free units.
        rows: free rows.
    """

    decoding: tuple[int, ...]
    memory: int = 0
    rows: int = 1 << 30


def most_admitted(
    prompts: Sequence[PromptDemand], room: Room, budget: PrefillBudget
) -> tuple[int, ...] | None:
    """Return the new prompts to admit, as indices of `prompts`, which are sorted by deadline.

    None: not even the running ones can be served in time.
    """
    memory = room.memory
    if sum(prompt.memory for prompt in prompts) <= memory:  # all fit: no need to count memory
        prompts, memory = [replace(prompt, memory=0) for prompt in prompts], 0
    table = _Table(prompts, room, memory, budget)
    for place in range(len(prompts)):
        table.fill(place)
    return table.admitted()


class _Table:
    """The states [M + 1, N_1 + 1, ..., N_L + 1] of every prompt; the first entry is the start."""

    def __init__(
        self, prompts: Sequence[PromptDemand], room: Room, memory: int, budget: PrefillBudget
    ) -> None:
        self._prompts, self._room, self._budget = prompts, room, budget
        tiers = len(room.decoding)
        self._most = [
            sum(p.tier == tier and not p.is_running for p in prompts) for tier in range(tiers)
        ]
        sizes = [most + 1 for most in self._most]
        grid = np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij"), axis=-1)
        self._new: Ints = grid  # [N_1 + 1, ..., L] of new requests
        self._has_rows = grid.sum(axis=-1) <= room.rows
        self._base = np.array(room.decoding, dtype=np.int64)  # grows with the running prompts
        start = np.full((memory + 1, *sizes), -np.inf)
        start[(0,) * start.ndim] = 0.0
        self._best: list[Floats] = [start]
        self._from: list[NDArray[np.int64]] = []  # entry that each state came from
        self._ends_ms = [0.0]
        self._first = 0  # first entry that may come last: none before a running prompt

    def fill(self, place: int) -> None:
        prompt = self._prompts[place]
        spans = np.array([prompt.deadline_ms - each for each in self._ends_ms[self._first :]])
        shape = (len(spans), *(1,) * len(self._most))
        counts = np.broadcast_to(
            self._base + self._new, (len(spans), *self._new.shape)
        )  # [J, N_1 + 1, ..., L]
        gained = self._budget.over(np.maximum(spans, 0.0).reshape(shape), counts)
        gained = np.where(spans.reshape(shape) < 0.0, -np.inf, gained)
        before = np.stack(self._best[self._first :]) + gained[:, None] - prompt.tokens
        best = before.max(axis=0)
        origin = before.argmax(axis=0) + self._first
        best[best < 0.0] = -np.inf
        if not prompt.is_running:
            best = _shifted(best, prompt.memory, prompt.tier, -np.inf)
            origin = _shifted(origin, prompt.memory, prompt.tier, 0)
            best[:, ~self._has_rows] = -np.inf
        self._best.append(best)
        self._from.append(origin)
        self._ends_ms.append(prompt.deadline_ms)
        if prompt.is_running:
            self._first = place + 1
            self._base[prompt.tier] += 1

    def admitted(self) -> tuple[int, ...] | None:
        last = np.stack(self._best[self._first :])
        holds = self._budget.holds(self._base + self._new)
        last = np.where(holds, last, -np.inf)
        is_possible = last > -np.inf
        if not is_possible.any():
            return None
        number = np.where(is_possible, self._new.sum(axis=-1), -1)
        number = np.where(number == number.max(), last, -np.inf)
        entry, *state = (int(each) for each in np.unravel_index(np.argmax(number), number.shape))
        entry += self._first
        found = []
        while entry:
            prompt = self._prompts[entry - 1]
            origin = int(self._from[entry - 1][tuple(state)])
            if not prompt.is_running:
                found.append(entry - 1)
                state[0] -= prompt.memory
                state[1 + prompt.tier] -= 1
            entry = origin
        return tuple(reversed(found))


def _shifted(states: NDArray, memory: int, tier: int, empty: float) -> NDArray:  # type: ignore[type-arg]
    """Return the states after one more request of the tier that takes `memory` units."""
    moved = np.full_like(states, empty)
    to, since = [slice(None)] * states.ndim, [slice(None)] * states.ndim
    for axis, by in ((0, memory), (1 + tier, 1)):
        by = min(by, states.shape[axis])
        to[axis], since[axis] = slice(by, None), slice(None, states.shape[axis] - by)
    moved[tuple(to)] = states[tuple(since)]
    return moved


def tiers_of(tpots_ms: Floats | Sequence[float]) -> tuple[float, ...]:
    """Return few TPOTs, ascending, that stand for many.

    None is looser than those that it stands for. An infinite one comes last.
    """
    given = np.asarray(tpots_ms, dtype=np.float64)
    is_finite = np.isfinite(given)
    distinct = np.unique(given[is_finite])
    if len(distinct) > _TIERS:
        # On a grid, so that the next cycle can reuse the results that are cached by tiers.
        distinct = np.unique(_GRID ** np.floor(np.log(distinct) / np.log(_GRID) + _ROUNDING))
    if len(distinct) > _TIERS:
        cuts = np.geomspace(distinct[0], distinct[-1] * (1.0 + _ROUNDING), _TIERS + 1)[:-1]
        distinct = np.unique(distinct[np.searchsorted(distinct, cuts * (1.0 - _ROUNDING))])
    has_none = not len(distinct) or not is_finite.all()
    return (*distinct.tolist(), *((math.inf,) if has_none else ()))


def tier_of(tiers_ms: Sequence[float], tpots_ms: Floats | float) -> Ints:
    """Return the loosest tier that is tight enough."""
    paces = np.asarray(tpots_ms) * (1.0 + _ROUNDING)
    return np.maximum(np.searchsorted(np.array(tiers_ms), paces, side="right") - 1, 0)


def tiers_for(load: Load, new: Sequence[Prompt]) -> tuple[float, ...]:
    prompts = [each.tpot_ms for each in (*load.prompts, *new)]
    return tiers_of(np.concatenate((load.tpot_ms, prompts)))


def counts_of(load: Load, tiers_ms: Sequence[float]) -> list[int]:
    """Return the number of decoding requests of each tier."""
    found = np.bincount(tier_of(tiers_ms, load.tpot_ms), minlength=len(tiers_ms))
    return [int(each) for each in found]


def reads_in_time(load: Load, budget_of: BudgetOf) -> bool:
    """Return whether all prompts are in time, and all requests can decode afterwards."""
    tiers = tiers_for(load, ())
    read, budget = demands_of(load.prompts, tiers), budget_of(tiers)
    joins = np.zeros((len(read) + 1, len(tiers)), dtype=np.int64)
    joins[1:] = np.eye(len(tiers), dtype=np.int64)[[each.tier for each in read]]
    decoding = np.array(counts_of(load, tiers)) + np.cumsum(joins, axis=0)  # before each deadline
    spans = np.diff([0.0, *(each.deadline_ms for each in read)])
    gained = np.where(spans < 0.0, -np.inf, budget.over(np.maximum(spans, 0.0), decoding[:-1]))
    left = np.cumsum(gained - [each.tokens for each in read])
    return bool((left >= 0.0).all() and budget.holds(decoding[-1]))


def demands_of(
    prompts: Sequence[Prompt], tiers_ms: Sequence[float], unit: float = math.inf
) -> list[PromptDemand]:
    paces = np.array([each.tpot_ms for each in prompts], dtype=np.float64)
    return [
        PromptDemand(
            each.deadline_ms,
            each.tokens,
            tier,
            0 if each.is_running else math.ceil(each.kv_tokens / unit),
            each.is_running,
        )
        for each, tier in zip(prompts, tier_of(tiers_ms, paces).tolist(), strict=True)
    ]


def best_set(
    load: Load,
    new: Sequence[Prompt],
    memory: Memory,
    tiers_ms: tuple[float, ...],
    budget: PrefillBudget,
) -> list[Prompt]:
    """Return the best set of prompts, running and new, by the dynamic program."""
    prompts = load.joined(new).prompts
    unit = math.inf if memory.tokens is None else max(1.0, memory.tokens / _UNITS)
    units = 0 if memory.tokens is None else math.floor(memory.tokens / unit)
    room = Room(tuple(counts_of(load, tiers_ms)), units, memory.rows)
    found = most_admitted(demands_of(prompts, tiers_ms, unit), room, budget)
    return [prompts[place] for place in found or ()]
