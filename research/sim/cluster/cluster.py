"""SimulatedCluster: replicas behind one router, in simulated time, routed as a cluster routes.

Contract: the cluster's own dispatcher ranks, from states as old as they are. A request that loses
its replica goes on elsewhere with the tokens that were received by then. The same requests,
seeds and failures give the same outcomes; without delays one replica gives what `SimulatedService`
gives.

Not simulated: what the router itself takes, prefix caches, and of a process that stands still the
rest of its cycle, whose tokens come as if it had gone on to its end.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from research.sim.cluster.events import Events
from research.sim.cluster.failures import Delays, Failure
from research.sim.cluster.fleet import SimulatedFleet
from research.sim.cluster.job import ClusterJob, Offer
from research.sim.cluster.refusals import Because, Refusal, Service
from research.sim.cluster.replica import Replica
from research.sim.cluster.site import Ask, Site
from specrouter.bench.replay import LoadRequest
from specrouter.cluster.correction import measured_ms
from specrouter.cluster.dispatcher import Dispatcher, feasible
from specrouter.cluster.fleet import overload_of
from specrouter.cluster.state import Ranking, ReplicaState, RoutedRequest
from specrouter.config import ResumeConfig, RoutingConfig

_LONGEST_QUEUE = 512  # where there is no bound: FlowGuard's queue is its share

MakeReplica = Callable[[], Replica]


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Attributes:
    max_waiting: requests without a row, from which on more are refused; None: no bound.
    rejects: requests end with an error where no replica attains their objective.
    """

    routing: RoutingConfig = field(default_factory=RoutingConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    delays: Delays = field(default_factory=Delays)
    failures: Sequence[Failure] = ()
    max_waiting: int | None = None
    rejects: bool = False


class SimulatedCluster:
    """A service and its clock. Args: `makes`: a new process of each replica, by its name."""

    def __init__(self, makes: Mapping[str, MakeReplica], settings: ClusterSettings) -> None:
        self._settings, routing = settings, settings.routing
        self.fleet = SimulatedFleet(tuple(makes))
        self.jobs: list[ClusterJob] = []
        self.refusals: list[Refusal] = []
        self._taken: list[tuple[float, int]] = []  # with a promise: when, and the prompt's tokens
        self._there: dict[str, dict[int, Ask]] = {name: {} for name in makes}  # current attempts
        self._homeless: list[ClusterJob] = []
        self._events, self._numbers = Events(), count()
        longest = settings.max_waiting or _LONGEST_QUEUE
        self._dispatcher = Dispatcher(self.fleet, routing, longest, False, {}, self.now_s)
        self._sites: list[Site] = []
        for number, (name, make) in enumerate(makes.items()):
            delay_s = settings.delays.message_s
            site = Site(name, make, self._events, self, delay_s, routing.metrics_s)
            self._sites.append(site)
            first_s = routing.metrics_s * number / len(makes)  # as processes that started apart
            self.fleet.tell(name, site.start(first_s), 0.0)
        for one in settings.failures:
            self._events.at(one.at_s, partial(self._fail, self._sites[one.replica], one))

    # The service

    def send(self, request: LoadRequest) -> ClusterJob:
        settings, now_s = self._settings, self._events.now_s
        job = ClusterJob(
            number=len(self.jobs), request=request, sent_s=now_s, delay_s=settings.delays.message_s
        )
        job.on_unattainable = "reject" if settings.rejects else "best_effort"
        self.jobs.append(job)
        views = self.fleet.ready(now_s)
        found = overload_of(views, settings.max_waiting) if views else None
        if not views:
            job.end("no replica is ready")
        elif found is not None:
            first = min(views, key=lambda view: view.state.retry_after_s)
            ahead = max(1, first.state.requests - first.state.rows + 1)
            self._refuse(job, "room", found.retry_after_s, first.name, ahead)
        else:
            self._route(job)
        return job

    def now_s(self) -> float:
        return self._events.now_s

    def sleep_s(self, duration_s: float) -> None:
        self._events.run_until(self._events.now_s + duration_s)

    def service(self) -> Service:
        """What was served so far."""
        return Service({site.name: site.rows_given_s for site in self._sites}, self._taken)

    # Where a request goes

    def _route(self, job: ClusterJob) -> None:
        """Ranks the replicas, and asks them in turn."""
        self.fleet.note_ages(self._events.now_s)
        routed = job.routed(next(self._numbers), self._events.now_s)
        ranking = self._dispatcher.rank(routed, (), job.avoided)
        if ranking is None:
            self._homeless.append(job)
            return
        self._offer(job, routed, self._offers(job, ranking, routed))

    def _offers(self, job: ClusterJob, ranking: Ranking, routed: RoutedRequest) -> Iterator[Offer]:
        """As `RequestForwarder` makes them."""
        asked = self._dispatcher.may_decline(ranking, routed)
        for name in asked:
            yield name, True
        if asked and self._settings.rejects and not routed.has_begun:
            late_ms = feasible(ranking).ttft_ms or 0.0
            late_s = max(0.0, late_ms - (job.request.ttft_ms or late_ms)) / 1000
            self._refuse(job, "objective", late_s)
            return
        for name in ranking.order:
            yield name, False

    def _offer(self, job: ClusterJob, routed: RoutedRequest, offers: Iterator[Offer]) -> None:
        offer = next(offers, None)
        if offer is None:  # it was refused: else somebody takes it, or its site is dead
            return
        name, may_decline = offer
        job.offers = offers
        ask = self._asked(job, routed, name, may_decline)
        self._there[name][job.number] = ask
        self.fleet.send(name, job.number, routed.prompt_tokens)
        self._site(name).offer(ask)

    def _asked(self, job: ClusterJob, routed: RoutedRequest, name: str, may_decline: bool) -> Ask:
        _, expected = self._dispatcher.expected(name, routed, ())
        return Ask(
            job=job,
            routed=routed,
            may_decline=may_decline,
            attempt=job.attempt,
            expected=expected,
            sent_s=self._events.now_s,
        )

    def _refuse(
        self, job: ClusterJob, because: Because, wait_s: float, replica: str = "", ahead: int = 0
    ) -> None:
        refusal = Refusal(
            at_s=self._events.now_s,
            because=because,
            retry_after_s=wait_s,
            prompt_tokens=len(job.request.token_ids),
            replica=replica,
            ahead=ahead,
        )
        self.refusals.append(refusal)
        job.end("refused")

    def _site(self, name: str) -> Site:
        return next(site for site in self._sites if site.name == name)

    # What replicas say

    def told(self, name: str, state: ReplicaState) -> None:
        self.fleet.tell(name, state, self._events.now_s)
        homeless, self._homeless = self._homeless, []
        for job in homeless:
            if not job.is_done:
                self._route(job)

    def taken(self, name: str, ask: Ask, state: ReplicaState) -> None:
        self._note(name, ask, state)
        ask.job.first_place = ask.job.first_place or name
        if ask.may_decline:
            self._taken.append((self._events.now_s, ask.routed.prompt_tokens))

    def declined(self, name: str, ask: Ask, state: ReplicaState) -> None:
        self._note(name, ask, state)
        if ask.is_current:
            self._there[name].pop(ask.job.number, None)
            self._offer(ask.job, ask.routed, ask.job.offers)

    def ended(self, name: str, ask: Ask, state: ReplicaState) -> None:
        self._note(name, ask, state)
        if ask.is_current:
            self._there[name].pop(ask.job.number, None)
            self._learn(name, ask)
            served = ask.job.served
            ask.job.end(served.sent.refusal if served else None)

    def unanswered(self, name: str, ask: Ask) -> None:
        if ask.is_current:
            self._move(name, ask, self._events.now_s)

    def _learn(self, name: str, ask: Ask) -> None:
        """From what came of an attempt, though it goes on elsewhere."""
        if ask.job.served is not None:
            came = [one for one in ask.job.served.sent.commits if one[0] > ask.sent_s]
            self.fleet.learn(name, ask.expected, *measured_ms(ask.sent_s, came))

    def _note(self, name: str, ask: Ask, state: ReplicaState) -> None:
        self.fleet.members[name].note(state, self._events.now_s)
        self.fleet.counted(name, ask.job.number)

    # Failures

    def _fail(self, site: Site, failure: Failure) -> None:
        name, at_s = site.name, self._events.now_s
        if not site.is_alive:
            return
        if failure.kind == "hangs":
            site.stand_still(failure.back_s)
            self._watch(site, at_s)
            return
        if failure.kind == "restarted":
            self._lose(name, at_s, is_failure=False)
        else:
            lost = partial(self._lose, name, at_s)
            self._events.after(self._settings.delays.loss_s, lost)
        site.kill()
        self._events.at(failure.back_s, site.replace)

    def _watch(self, site: Site, at_s: float) -> None:
        """Of one that stands still since `at_s`, whose last message may have been on its way."""
        due_s = self.fleet.members[site.name].reported_s + self._settings.resume.silence_s
        if not site.stands_still:
            return
        if due_s > self._events.now_s:
            self._events.at(due_s, partial(self._watch, site, at_s))
        else:
            self._lose(site.name, at_s)

    def _lose(self, name: str, at_s: float, is_failure: bool = True) -> None:
        """Whoever is there goes on elsewhere, with what came before `at_s`."""
        self.fleet.lose(name)
        for ask in list(self._there[name].values()):
            self._move(name, ask, at_s, is_failure)

    def _move(self, name: str, ask: Ask, at_s: float, is_failure: bool = True) -> None:
        job = ask.job
        self._there[name].pop(job.number, None)
        self.fleet.counted(name, job.number)
        served = job.served
        self._learn(name, ask)
        job.cut(at_s)
        if is_failure:
            job.failures += 1
            job.avoided[name] = self._events.now_s
        if served is not None and job.tokens >= job.request.new_tokens:
            job.served = served  # all of it had come
            job.end()
        elif job.failures > self._settings.resume.limit:
            job.end("its replicas have failed")
        else:
            if served is not None:
                served.sent.cancel()
            self._route(job)
