"""Load: what requests with objectives need, from now on. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

EPS_MS = 1e-6
_ROUNDING = 1e-9
_TIERS = 3  # of finite TPOTs that the dynamic program tells apart
_GRID = 1.05  # ratio of TPOTs that are told apart where there are more


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A request whose prompt has to be read.

    Attributes:
        deadline_ms: of its first token, from now.
        tokens: of its prompt that are left, with the one that brings the first token.
        tpot_ms: of its output; infinite without such an objective.
        kv_tokens: KV that it needs.
        left: tokens of its output after the first one, as far as is known.
        is_soft: the deadline is no objective.
        can_wait: it is only there so that the request does not wait for ever.
    """

    id: int
    deadline_ms: float
    tokens: int
    tpot_ms: float
    kv_tokens: int = 0
    is_running: bool = False
    left: float = math.inf
    is_soft: bool = False
    can_wait: bool = False


def by_deadline(prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    return tuple(sorted(prompts, key=lambda each: each.deadline_ms))


@dataclass(frozen=True, eq=False, kw_only=True)
class Load:
    """Attributes:
    ids: [R] of decoding requests that have a TPOT.
    due_ms: [R] when each one's next token is due, from now.
    tpot_ms: [R] finite.
    left: [R] tokens that are still to come, as far as is known.
    prompts: of admitted requests, by rising deadline.
    others: requests that decode beside them, a token in a cycle, whose pace is not kept.
    """

    ids: tuple[int, ...]
    due_ms: Floats
    tpot_ms: Floats
    left: Floats
    prompts: tuple[Prompt, ...]
    others: int = 0

    def joined(self, prompts: Sequence[Prompt]) -> "Load":
        """With further prompts that are admitted."""
        if not prompts:
            return self
        return replace(self, prompts=by_deadline((*self.prompts, *prompts)))

    def without_neediest(self, count: int) -> "Load":
        """Without the paces of so many of those that decode, whose TPOTs are the tightest."""
        kept = np.sort(np.argsort(self.tpot_ms, kind="stable")[count:])
        ids = tuple(self.ids[place] for place in kept.tolist())
        return replace(
            self,
            ids=ids,
            due_ms=self.due_ms[kept],
            tpot_ms=self.tpot_ms[kept],
            left=self.left[kept],
            others=self.others + len(self.ids) - len(ids),
        )

    def after(self, batch_ms: float, served: Bools, chunks: Sequence[int]) -> "Load":
        """When a batch has ended that brought tokens of `served` [R] and read these `chunks`."""
        due = self.due_ms - batch_ms + np.where(served, self.tpot_ms, 0.0)
        ids, paces, rest, left = list(self.ids), list[float](), list[float](), list[Prompt]()
        for prompt, chunk in zip(self.prompts, chunks, strict=True):
            if chunk < prompt.tokens:
                deadline_ms = prompt.deadline_ms - batch_ms
                left.append(replace(prompt, deadline_ms=deadline_ms, tokens=prompt.tokens - chunk))
            elif math.isfinite(prompt.tpot_ms):
                ids.append(prompt.id)
                paces.append(prompt.tpot_ms)
                rest.append(prompt.left)
        return Load(
            ids=tuple(ids),
            due_ms=np.concatenate((due, paces)),
            tpot_ms=np.concatenate((self.tpot_ms, paces)),
            left=np.concatenate((self.left, rest)),
            prompts=tuple(left),
            others=self.others,
        )

    @property
    def tightest_ms(self) -> float:
        """Of those that decode; infinite if nobody does."""
        return float(self.tpot_ms.min(initial=np.inf))


def tiers_of(tpots_ms: Floats | Sequence[float]) -> tuple[float, ...]:
    """Few TPOTs, rising, that stand for many: none is looser than those that it stands for. An
    infinite one comes last."""
    given = np.asarray(tpots_ms, dtype=np.float64)
    is_finite = np.isfinite(given)
    distinct = np.unique(given[is_finite])
    if len(distinct) > _TIERS:
        # On a grid, so that what was worked out for a cycle's tiers is of use in the next.
        distinct = np.unique(_GRID ** np.floor(np.log(distinct) / np.log(_GRID) + _ROUNDING))
    if len(distinct) > _TIERS:
        cuts = np.geomspace(distinct[0], distinct[-1] * (1.0 + _ROUNDING), _TIERS + 1)[:-1]
        distinct = np.unique(distinct[np.searchsorted(distinct, cuts * (1.0 - _ROUNDING))])
    has_none = not len(distinct) or not is_finite.all()
    return (*distinct.tolist(), *((math.inf,) if has_none else ()))


def tier_of(tiers_ms: Sequence[float], tpots_ms: Floats | float) -> Ints:
    """The loosest tier that is tight enough."""
    paces = np.asarray(tpots_ms) * (1.0 + _ROUNDING)
    return np.maximum(np.searchsorted(np.array(tiers_ms), paces, side="right") - 1, 0)
