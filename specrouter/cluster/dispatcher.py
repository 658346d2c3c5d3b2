"""Dispatcher: applies the routing policy to each attempt, and records the decisions.

Contract: one record for every decision, with the terms of every replica that was considered and the
reason for each that was not. It keeps the last 256. It belongs to the fleet's loop; records may be
read from any thread.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prometheus_client import Histogram

from specrouter.cluster.admission import expected_at
from specrouter.cluster.correction import Expected
from specrouter.cluster.pairs import Halves, arranged
from specrouter.cluster.policy import RoutingSettings, rank, unread
from specrouter.cluster.roster import Roster
from specrouter.cluster.state import Ranking, RoutedRequest
from specrouter.config import RoutingConfig
from specrouter.request.output import Feasible

_RECORDS = 256
_ASKED = 4  # replicas, one after the other: each refusal delays the first token by a round trip
# They contain the defaults of `metrics_s` and `silence_s`, and 0.6, the aim for 99%.
_AGE_BOUNDS_S = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5)


class Dispatcher:
    """Routing of attempts among the fleet's replicas.

    Args:
        fleet: the replicas.
        config: the section `cluster.routing`.
        longest_queue: most requests that may wait.
        caches_prefixes: replicas have a prefix cache.
        pairs: pairs by name; see `arranged`.
        clock: the clock of the roster's times, in seconds.
    """

    def __init__(
        self,
        fleet: Roster[Any],
        config: RoutingConfig,
        longest_queue: int,
        caches_prefixes: bool,
        pairs: Mapping[str, Halves],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pairs = pairs
        self._fleet, self._clock = fleet, clock
        self._caches_prefixes = caches_prefixes
        self._config = config
        self._settings = RoutingSettings(longest_queue)
        self.numbers = itertools.count()  # numbers of decisions
        self.ages = state_ages()
        self._records: deque[Mapping[str, Any]] = deque(maxlen=_RECORDS)

    @property
    def records(self) -> list[Mapping[str, Any]]:
        """Records of decisions, oldest first."""
        return list(self._records)

    def may_decline(self, ranking: Ranking, request: RoutedRequest) -> Sequence[str]:
        """Return the replicas that may decline the request, before one has to take it."""
        if request.objective is None or not ranking.asks:
            return ()
        return ranking.order[:_ASKED]

    def rank(
        self, request: RoutedRequest, keys: Sequence[bytes], avoided: Mapping[str, float]
    ) -> Ranking | None:
        """Rank the replicas for a request; None if no replica can be chosen now.

        Args:
            request: what is still to be served of the request.
            keys: keys of the prompt's blocks.
            avoided: replicas that have failed the request, and when. One of them is chosen only if
                there is no other and it has reported since: a dead replica fails all requests until
                its death is known.
        """
        now_s = self._clock()
        views = self._fleet.ready(now_s, keys)
        for view in views:
            self.ages.observe(view.age_s)
        excluded = self._fleet.excluded(views)
        fresh = [view for view in views if view.name not in avoided]
        reported_s = {name: member.reported_s for name, member in self._fleet.members.items()}
        again = [
            view for view in views if reported_s[view.name] > avoided.get(view.name, -math.inf)
        ]
        if not (fresh or again):
            return None
        if fresh:
            excluded |= {
                view.name: "it has failed this request" for view in views if view.name in avoided
            }
        choices, left_out = arranged(fresh or again, self.pairs)
        ranking = rank(self._config.policy, request, choices, self._settings)
        return replace(ranking, excluded={**excluded, **left_out, **ranking.excluded})

    def expected(
        self, replica: str, request: RoutedRequest, keys: Sequence[bytes]
    ) -> tuple[RoutedRequest, Expected]:
        """Return what a replica has to read of a request, and the expected times of the attempt."""
        views = self._fleet.ready(self._clock(), keys)
        view = next((view for view in views if view.name == replica), None)
        if view is None:
            return request, Expected()
        left = unread(request, view)
        return left, expected_at(view, left)

    def note_sent(self, replica: str, keys: Sequence[bytes]) -> None:
        """Note that a replica accepted a prompt; ignored if the replica was lost meanwhile."""
        member = self._fleet.members[replica]
        if self._caches_prefixes and member.state is not None and member.standing == "ready":
            member.prompts.note(keys, member.state.kv_capacity_tokens)

    def keep(
        self,
        ranking: Ranking,
        chosen: str,
        request: RoutedRequest,
        attempt: Mapping[str, Any],
        reason: str | None = None,
    ) -> None:
        """Record a decision.

        `attempt` holds its request id, sample and number; `reason` replaces the ranking's reason.
        """
        self._records.append(
            {
                "unix_s": round(time.time(), 3),
                **attempt,
                "policy": self._config.policy,
                "replica": chosen,
                "reason": reason or ranking.reason,
                "order": list(ranking.order),
                "terms": {name: _shown(terms) for name, terms in ranking.terms.items()},
                "excluded": dict(ranking.excluded),
                "prompt_tokens": request.prompt_tokens,
                "elapsed_ms": round(request.elapsed_ms, 3),
            }
        )


def feasible(ranking: Ranking) -> Feasible:
    """Return the best times that any replica could give."""
    terms = ranking.terms.values()
    return Feasible(
        min((one["ttft_ms"] for one in terms if "ttft_ms" in one), default=None),
        min((one["tpot_ms"] for one in terms if "tpot_ms" in one), default=None),
    )


def _shown(terms: Mapping[str, float]) -> dict[str, float | None]:
    """Round the terms, with None for infinity, which JSON does not have."""
    return {name: round(each, 4) if math.isfinite(each) else None for name, each in terms.items()}


def state_ages() -> Histogram:
    """Return a histogram of the age of every replica's state at every decision."""
    return Histogram(
        "specrouter_replica_state_age_at_use_seconds",
        "Age of a replica's state, when a request was routed by it.",
        buckets=_AGE_BOUNDS_S,
        registry=None,
    )
