"""ClusterJob: a request on its way through a simulated cluster, whichever replicas serve it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from research.sim.cluster.replica import Served
from research.sim.request import Commits, asked_objective
from specrouter.bench.replay import LoadRequest, ReplayAnswer
from specrouter.cluster.resume import draw
from specrouter.cluster.state import RoutedRequest
from specrouter.request.objective import Objective, OnUnattainable

Offer = tuple[str, bool]  # a replica to ask, and whether it may decline


@dataclass(eq=False, kw_only=True)
class ClusterJob:
    """A `Pending`.

    Attributes:
        offers: what is tried next, of the last ranking.
        attempt: number of the current one; news of earlier ones are not listened to.
        served: where it is, once it was taken there.
        first_place: where its first attempt was taken.
        commits: tokens that were received in earlier attempts.
        avoided: replicas that have failed it, and when.
        moves: attempts that were cut off; `failures` of them count.
        delay_s: of an answer.
    """

    number: int
    request: LoadRequest
    sent_s: float
    delay_s: float
    on_unattainable: OnUnattainable = "best_effort"
    offers: Iterator[Offer] = field(default_factory=lambda: iter(()))
    attempt: int = 0
    first_place: str | None = None
    served: Served | None = None
    commits: list[Commits] = field(default_factory=list)
    avoided: dict[str, float] = field(default_factory=dict)
    moves: int = 0
    failures: int = 0
    error: str | None = None
    is_done: bool = False

    @property
    def tokens(self) -> int:
        """That were received before this attempt."""
        return sum(count for _, count in self.commits)

    def routed(self, number: int, now_s: float) -> RoutedRequest:
        """As `Progress.routed` has it."""
        asked = self.request
        return RoutedRequest(
            number=number,
            prompt_tokens=len(asked.token_ids) + self.tokens,
            remaining=asked.new_tokens - self.tokens,
            objective=self.objective,
            elapsed_ms=(now_s - self.sent_s) * 1000,
            has_begun=bool(self.commits),
            dice=draw(asked.seed, 0, self.attempt),
        )

    @property
    def objective(self) -> Objective | None:
        found = asked_objective(self.request)
        return found and replace(found, on_unattainable=self.on_unattainable)

    def cut(self, now_s: float) -> None:
        """Leaves its replica with what was received by then."""
        if self.served is not None:
            self.commits = [one for one in self.served.sent.commits if one[0] <= now_s]
        self.served = None
        self.attempt += 1
        self.moves += 1

    def end(self, error: str | None = None) -> None:
        self.is_done, self.error = True, error

    def cancel(self) -> None:
        if self.served is not None:
            self.served.sent.cancel()
        self.end("cancelled")

    def answer(self) -> ReplayAnswer:
        if self.error is not None or self.served is None:
            return ReplayAnswer(
                ttft_ms=None, tpot_ms=None, tokens=0, error=self.error or "not served"
            )
        found = self.served.sent.answer()
        ttft_ms = None if found.ttft_ms is None else found.ttft_ms + 1000.0 * self.delay_s
        return replace(found, ttft_ms=ttft_ms)
