"""Ways to serve requests that change no token of their texts, and whether they came about.

Contract: an arrangement that did not happen (no draft accepted, no token cached) is told of, since
equal texts say nothing then. `REFERENCE` reads a prompt whole, alone, and without drafts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from specrouter import ChainRouter, RequestOutput, SamplingParams, Speculation
from specrouter.request.spec import SpeculationOverride
from specrouter.slo.admission import Admission, Admit, fcfs
from specrouter.view import EngineView
from test_support.preemption import preempting_router

Prompt = tuple[int, ...]
Texts = tuple[tuple[int, ...], ...]
Drafts = Literal["off", "routed", "asked"]
Sign = Literal["accepted", "cached", "together", "chunks", "preempted"]

_DEPTH = 8  # draft tokens where drafts are asked for


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """
    Attributes:
        drafts: "routed": as the router likes; "asked": in every cycle.
        caches: it may be served from what earlier requests have read.
        before: it is served once before in this way, and kept for the second time, of which alone
            `shows` is asked.
        tenant: whose requests they are, so that no other one's outputs are quoted; None: nobody's.
        batch: requests that are sent together.
        chunk: prompt tokens that are read in a cycle; None: as configured.
        preempted: chance of a running request to lose its row, in each cycle.
        shows: what must have been seen of it.
    """

    name: str
    drafts: Drafts = "routed"
    caches: bool = False
    before: Drafts | None = None
    tenant: str | None = None
    batch: int = 1
    chunk: int | None = None
    preempted: float = 0.0
    shows: tuple[Sign, ...] = ()


REFERENCE = Arrangement(name="off", drafts="off")
ARRANGEMENTS = (
    Arrangement(name="on", tenant="on", shows=("accepted",)),
    Arrangement(name="repeated", caches=True, before="routed", shows=("cached",)),
    Arrangement(name="quoted", drafts="asked", before="asked", shows=("accepted",)),
    Arrangement(name="batch", tenant="batch", batch=4, shows=("together",)),
    Arrangement(name="chunks", drafts="asked", chunk=16, shows=("accepted", "chunks")),
    Arrangement(
        name="preempted",
        drafts="asked",
        tenant="preempted",
        caches=True,
        preempted=0.1,
        shows=("accepted", "preempted"),
    ),
)


@dataclass(frozen=True)
class Asked:
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Served:
    """
    Attributes:
        texts: token ids of each request's; `before`: of the time before, if there was one.
        logprobs: of those tokens, where they were asked for.
        signs: accepted and cached tokens, requests that ran together, cycles in which one read its
            prompt, and preemptions.
    """

    texts: Texts
    logprobs: tuple[tuple[float, ...], ...]
    signs: dict[Sign, int]
    before: Texts | None = None

    def missing(self, arrangement: Arrangement) -> list[Sign]:
        """What did not come about of it."""
        least: dict[Sign, int] = {"together": 2, "chunks": 2}
        return [one for one in arrangement.shows if self.signs[one] < least.get(one, 1)]

    def differing(self, texts: Texts) -> list[int]:
        """Numbers of the requests with another text."""
        before = set() if self.before is None else set(_unequal(self.before, texts))
        return sorted(before.union(_unequal(self.texts, texts)))

    def differing_in_bits(self, reference: "Served") -> list[int]:
        """Numbers of the requests with another log-probability."""
        return _unequal(self.logprobs, reference.logprobs)


def serve(router: ChainRouter, asked: Sequence[Asked], arrangement: Arrangement) -> Served:
    """Every request, in its order. Raises `RuntimeError` for one that fails."""
    before, outputs = list[RequestOutput](), list[RequestOutput]()
    with _observed(router, arrangement) as seen:
        for start in range(0, len(asked), arrangement.batch):
            part = asked[start : start + arrangement.batch]
            if arrangement.before is not None:
                first = replace(arrangement, drafts=arrangement.before, caches=True)
                before += _sent(router, part, first)
            outputs += _sent(router, part, arrangement)
    served = Served(
        texts=_texts(outputs),
        before=_texts(before) if before else None,
        logprobs=tuple(tuple(each.logprob for each in one.logprobs or ()) for one in outputs),
        signs={
            "accepted": sum(one.metrics.accepted_tokens for one in outputs),
            "cached": sum(one.metrics.cached_tokens for one in outputs),
            "together": seen.together,
            "chunks": max(seen.chunks.values(), default=0),
            "preempted": seen.preempted,
        },
    )
    assert arrangement != REFERENCE or not (served.signs["accepted"] or served.signs["cached"])
    return served


def _texts(outputs: Sequence[RequestOutput]) -> Texts:
    return tuple(tuple(one.token_ids) for one in outputs)


def _unequal(own: Sequence[object], others: Sequence[object]) -> list[int]:
    pairs = zip(own, others, strict=True)
    return [number for number, (one, other) in enumerate(pairs) if one != other]


def _sent(
    router: ChainRouter, part: Sequence[Asked], arrangement: Arrangement
) -> list[RequestOutput]:
    ways: dict[Drafts, SpeculationOverride] = {
        "off": "off",
        "routed": None,
        "asked": Speculation(tuple(router.pool.names), depth=_DEPTH),
    }
    caches, tenant = arrangement.caches, arrangement.tenant
    params = [replace(one.params, prefix_cache=caches, cache_salt=tenant) for one in part]
    outputs = router.generate([one.prompt for one in part], params, ways[arrangement.drafts])
    for one in outputs:
        if one.finish_reason == "error":
            raise RuntimeError(one.error)
    return outputs


@dataclass
class _Seen:
    """Decides as another one, and notes what it decided."""

    admits: Admit
    together: int = 0
    preempted: int = 0
    chunks: Counter[int] = field(default_factory=Counter)  # by request

    def __call__(self, view: EngineView) -> Admission:
        decided = self.admits(view)
        running = len(view.running) + len(decided.admitted) - len(decided.preempted)
        self.together = max(self.together, running)
        self.preempted += len(decided.preempted)
        self.chunks.update(decided.chunks.keys())
        return decided


@contextmanager
def _observed(router: ChainRouter, arrangement: Arrangement) -> Iterator[_Seen]:
    policies = router.instruments.engine.policies
    with ExitStack() as stack:
        if arrangement.preempted:
            stack.enter_context(preempting_router(router, arrangement.preempted))
        usual = policies.admits
        seen = _Seen(usual if arrangement.chunk is None else fcfs(arrangement.chunk))
        policies.admits = seen
        try:
            yield seen
        finally:
            policies.admits = usual
