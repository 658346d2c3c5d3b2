"""Rows that are taken from running requests at random, by a policy that does nothing else odd."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import numpy as np

from specrouter import ChainRouter
from specrouter.engine.engine import Engine
from specrouter.slo.admission import Admission, Admit
from specrouter.slo.serve.measured_pacing import SLO
from specrouter.view import EngineView


@dataclass
class RandomPreemption:
    """Another policy, for which rows are freed: each running request's with this chance a cycle.

    Pure but for `count`, of the rows that were taken.
    """

    policy: Admit
    share: float
    count: int = field(default=0, compare=False)

    def __call__(self, view: EngineView) -> Admission:
        draws = np.random.default_rng(view.cycle)
        running = view.running
        taken = running.take(draws.random(len(running)) < self.share)
        ids = tuple(taken.id.tolist())
        free = view.kv_free_tokens
        if free is not None:
            free += int(taken.kv_tokens.sum())
        seen = replace(view.without(ids), free_rows=view.free_rows + len(ids), kv_free_tokens=free)
        self.count += len(ids)
        decided = self.policy(seen)
        return replace(decided, preempted=(*ids, *decided.preempted))


@contextlib.contextmanager
def preempting(engine: Engine, share: float) -> Iterator[RandomPreemption]:
    """The engine's admission, disturbed, whatever is asked for meanwhile."""
    policies = engine.policies
    usual = policies.admission, policies._admission, policies.admits
    disturbed = RandomPreemption(policies.admits, share)
    policies.admission, policies._admission, policies.admits = "slo", SLO, disturbed
    try:
        with patch.object(policies, "_admit"):  # another policy would come undisturbed
            yield disturbed
    finally:
        policies.admission, policies._admission, policies.admits = usual


@contextlib.contextmanager
def preempting_router(router: ChainRouter, share: float) -> Iterator[RandomPreemption]:
    with preempting(router.instruments.engine, share) as disturbed:
        yield disturbed
