"""A router without models: every sample of every request gets the same runs of tokens.

And a real router without models: its engine gives every sample a token of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from transformers import PreTrainedTokenizerBase

from specrouter import (
    SLO,
    ChainRouter,
    Delta,
    RequestError,
    RequestMetrics,
    RequestOutput,
    RouterConfig,
    Structure,
    TokenLogprobs,
)
from specrouter.cycle import DraftShape, Option
from specrouter.engine.admission_log import AdmissionRecord
from specrouter.engine.engine_state import EngineState
from specrouter.engine.prefix_record import PrefixRecord
from specrouter.engine.request import Request
from specrouter.engine.serving import Health
from specrouter.engine.slo_accounts import Percentiles, SloAccounts, SloFigures, SloReport
from specrouter.execution.hang_guard import HangGuard
from specrouter.profile.calibration import CalibrationFigures
from specrouter.profile.profiler import EngineStatistics
from specrouter.request.lanes import Lanes
from specrouter.request.objective import Objective, SloLike, resolve
from specrouter.request.output import DecodeStep, Feasible, FinishReason
from specrouter.request.running import RunningRequest
from specrouter.routing.decision_record import DecisionRecord
from specrouter.view import ChainDecision

_POOL = {
    "target": "big",
    "models": [{"name": name, "source": f"path:/none/{name}"} for name in ("small", "big")],
}
RUNS = ((" a", [5]), ("b\nc", [6, 7]), (" é", [8]))
METRICS = RequestMetrics(
    ttft_ms=20.0,
    tpot_ms=10.0,
    acceptance_length=1.5,
    cycles=4,
    chains={("small", "big"): 3, ("big",): 1},
    e2e_ms=50.0,
    prompt_tokens=2,
    output_tokens=4,
    drafted_tokens=5,
    accepted_tokens=2,
    steps=(DecodeStep(("small", "big"), 5, 3, 3), DecodeStep(("big",), 0, 1, 1)),
)
BASELINE_TPOT_MS = 40.0
_FIGURES = SloFigures(
    requests=2,
    judged=2,
    attained=1,
    attainment=0.5,
    tokens=8,
    tokens_per_s=4.0,
    goodput_tokens_per_s=2.0,
    ttft_ms=Percentiles(20.0, 21.0, 22.0),
    tpot_ms=None,
    e2e_ms=None,
)
SLO_REPORT = SloReport(2.0, _FIGURES, {"interactive": _FIGURES})
STATISTICS = EngineStatistics(
    cycles=4,
    cycle_ms=80.0,
    model_ms={"big": 60.0},
    logits_ms=8.0,
    forwards={"big": 4},
    pack_tokens={"big": 20},
    committed_tokens=6,
    target_passes=4,
    switches=1,
)
_CHOSEN = Option(
    chain=("small", "big"), shape=DraftShape(4, 2, 6), cycle_ms=30.0, tokens=2.5, ms_per_token=12.0
)
ADMISSION = AdmissionRecord(
    cycle=9,
    unix_s=1.7e9,
    request=3,
    request_id="abc",
    slo_class="default",
    objective=None,
    outcome="rejected",
    reason="its objective cannot be attained beside those of admitted requests, if at all",
    waited_ms=12.5,
    running=4,
    feasible=Feasible(ttft_ms=900.0),
)
DECISION = DecisionRecord(
    cycle=3,
    unix_s=1e9,
    requests=2,
    decision=ChainDecision(
        chain=_CHOSEN.chain,
        shape=_CHOSEN.shape,
        reason="first decision",
        predicted=_CHOSEN,
        alternatives=(Option(chain=("big",), cycle_ms=20.0, ms_per_token=20.0),),
    ),
)
TOKEN_TEXTS = {5: " a", 6: "b", 7: "\nc", 8: " é"}
_FIRST_CHARACTER = 100  # the id of chr(0)


# Of the target: what a fingerprint asks.
PLAN = SimpleNamespace(
    dtype="float32", weights="auto", is_recurrent=False, placement=SimpleNamespace(is_on_cpu=False)
)


def logprobs_of(ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """What every request gets that asks for them; the less likely tokens are impossible."""
    likely = [(5, -0.25), *((token, -math.inf) for token in (6, 7, 8))]
    return [TokenLogprobs(token, -token / 4, tuple(likely[:top])) for token in ids]


def prompt_logprobs_of(
    prompt: str | Sequence[int], top: int | None
) -> list[TokenLogprobs | None] | None:
    """Of a prompt in ids: a token's number divided by -1000."""
    if top is None or isinstance(prompt, str):
        return None
    return [
        None,
        *(TokenLogprobs(token, -token / 1000, ((5, -0.25),)[:top]) for token in prompt[1:]),
    ]


def without_tokens(last: Delta) -> Delta:
    """The end of a sample that has said nothing."""
    assert last.output is not None
    output = replace(last.output, text="", token_ids=[])
    return Delta(finish_reason=output.finish_reason, index=last.index, output=output)


class FakeTokenizer:
    """A token for each character, after a special one that begins a text; and `TOKEN_TEXTS`."""

    begin = 1
    vocab_size = 10_000
    special_tokens_map: Mapping[str, str] = {}
    added_tokens_decoder: Mapping[int, Any] = {}

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [min(_FIRST_CHARACTER + ord(character), self.vocab_size - 1) for character in text]
        return {"input_ids": [self.begin, *ids] if add_special_tokens else ids}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(self.convert_ids_to_tokens, ids))

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        if not isinstance(ids, int):
            return [self.convert_ids_to_tokens(token) for token in ids]
        if ids == self.begin:
            return "<s>"
        return TOKEN_TEXTS.get(ids) or chr(ids - _FIRST_CHARACTER)

    def get_chat_template(self, chat_template: str | None, tools: list[Any] | None) -> str | None:
        return chat_template or self.chat_template


PREFIX = PrefixRecord(
    unix_s=1_700_000_000.25, request=3, request_id="r-3", prompt_tokens=40, cached_tokens=30
)


@dataclass(frozen=True)
class FakeLimits:
    max_tokens: int
    max_characters: int = 64 * 100

    def check_text(self, field: str, text: str) -> None:
        if len(text) > self.max_characters:
            raise RequestError(field, f"has {len(text)} characters")


class FakeStream:
    """Tells what is `waiting`, or holds or breaks on the way, as its router says."""

    def __init__(self, router: FakeRouter) -> None:
        self._router, self._told = router, 0
        self.waiting: deque[tuple[int, Delta]] | None = None  # None: nothing was submitted

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        if not self.waiting:
            raise StopAsyncIteration
        if self._told == self._router.hold_after:
            await asyncio.Event().wait()
        if self._router.crash and self._told == 1:
            raise RuntimeError("the engine broke")
        self._told += 1
        return self.waiting.popleft()

    async def aclose(self) -> None:
        if self.waiting is not None:
            self._router.open_requests -= 1
        self.waiting = None


@dataclass(kw_only=True, eq=False)
class FakeRouter:
    """Records what it is asked.

    `hold_after`: waits forever after that many runs, as a slow request does. `error`: ends the
    request's last sample with that failure. `crash`: raises in mid-stream, as no router should.
    `refuses`: what it says to every request. `ends`: how texts end. `server`: its configuration.
    `silent`: how many samples of a prompt, the last ones, end without a token. `runs`: what every
    sample says. `refuses_structures`: sources that cannot be compiled. `rejects`: what is feasible
    instead of the objective that it cannot attain, for the last sample.
    """

    hold_after: int | None = None
    error: str | None = None
    crash: bool = False
    refuses: Exception | None = None
    ends: FinishReason = "length"
    silent: int = 0
    stop_reason: str | int | None = None
    server: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    runs: Sequence[tuple[str, list[int]]] | None = None
    refuses_structures: Collection[str] = ()
    rejects: Feasible | None = None

    fingerprint = "fp_0123456789ab"
    slo_classes: ClassVar = {
        "interactive": SLO(tpot_ms=50, ttft_ms=1000),
        "coding": SLO(tpot_ratio=1.2),
    }
    replicas: ClassVar[Mapping[str, str]] = {}  # what each is doing
    sampling_defaults: ClassVar[Mapping[str, Any]] = {}
    is_closed = False
    restarted = 0
    open_requests = 0

    def __post_init__(self) -> None:
        self.pool = SimpleNamespace(
            plan=lambda _: PLAN,
            target="big",
            bits_depend_on=None,
            names=("small", "big"),
            tokenizer=self.tokenizer or FakeTokenizer(),
            vocab_size=FakeTokenizer.vocab_size,
        )
        self.config = RouterConfig.load({"pool": _POOL, "server": self.server})
        self.max_request_tokens = 64
        self.lanes = Lanes()
        self.is_healthy = True
        self.calls: list[tuple[Any, Any, Any]] = []
        self.slos: list[SloLike | Objective] = []  # of the calls
        self.terms: list[tuple[int, float | None, int | None]] = []  # priority, timeout, waiting
        self.elapsed_s: list[float] = []  # before requests were submitted
        self._objective: Objective | None = None  # of the last call

    def __enter__(self) -> FakeRouter:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    @property
    def instruments(self) -> FakeRouter:
        return self

    @property
    def limits(self) -> FakeLimits:
        return FakeLimits(self.max_request_tokens)

    def engine_state(self) -> EngineState:
        return EngineState(
            running=self.open_requests,
            waiting=0,
            rows=8,
            kv_reserved_tokens=0,
            kv_capacity_tokens=64,
            kv_bytes={},
            quarantines={},
            quarantined=frozenset(),
        )

    def health(self) -> Health:
        return Health("ok" if self.is_healthy else "stopped", self.replicas)

    def restart_replicas(self) -> None:
        self.restarted += 1

    def routings(self) -> list[dict[str, Any]]:
        return []

    def check_room(self, max_waiting: int | None = None) -> None:
        if self.refuses is not None:
            raise self.refuses

    def check_structure(self, structure: Structure) -> None:
        """A real router compiles it."""
        if any(part in structure.source for part in self.refuses_structures):
            raise RequestError("structure", "cannot be compiled")

    @property
    def streams(self) -> FakeRouter:
        return self

    def open(self) -> FakeStream:
        return FakeStream(self)

    def submit_each(
        self, asked: Sequence[Request], stream: FakeStream, max_waiting: int | None = None
    ) -> None:
        """The prompts take turns, the last one first."""
        self.check_room(max_waiting)
        for one in asked:
            self._accept(one.prompt, one.params, one.speculation, one.slo)
        self.terms.append((one.priority, one.timeout_s, max_waiting))
        self.elapsed_s.append(one.elapsed_s)
        self.open_requests += 1
        each = [
            [(at, delta) for delta in self._deltas(one.params, one.prompt)]
            for at, one in reversed(list(enumerate(asked)))
        ]
        stream.waiting = deque(itertools.chain.from_iterable(zip(*each, strict=True)))

    def stream(
        self,
        prompt: str | Sequence[int],
        params: Any,
        speculation: Any = None,
        slo: SloLike = None,
    ) -> Iterator[Delta]:
        self._accept(prompt, params, speculation, slo)
        return iter(self._deltas(params, prompt))

    def decisions(self) -> list[DecisionRecord]:
        return [DECISION]

    def admissions(self) -> list[AdmissionRecord]:
        return [ADMISSION]

    def prefixes(self) -> list[PrefixRecord]:
        return [PREFIX]

    def statistics(self) -> EngineStatistics:
        return STATISTICS

    def performance(self) -> Any:
        figures = CalibrationFigures(100.0, 0.02, 0.1, 0.2)
        trees = {(("small",), "big", True): SimpleNamespace(calibration=figures)}
        return SimpleNamespace(trees=trees)

    @property
    def slo_accounts(self) -> Any:
        return SimpleNamespace(report=lambda: SLO_REPORT)

    def _accept(
        self, prompt: str | Sequence[int], params: Any, speculation: Any, slo: SloLike | Objective
    ) -> None:
        for name in getattr(speculation, "chain", None) or ():
            if name not in self.pool.names:
                raise RequestError("speculation.chain", f"{name!r} is not in the pool")
        # It refuses what a router refuses.
        self._objective = resolve(slo, self.slo_classes, lambda: BASELINE_TPOT_MS)
        self.calls.append((prompt, params, speculation))
        self.slos.append(slo)

    def _deltas(self, params: Any, prompt: str | Sequence[int]) -> list[Delta]:
        """Run after run; the samples take turns, the last one first."""
        samples = [self._sample(params, index, prompt) for index in reversed(range(params.n))]
        for sample in samples[: self.silent]:
            sample[:] = [without_tokens(sample[-1])]
        if self.rejects is not None:
            samples[0] = [self._rejection(samples[0][-1], self.rejects)]
        turns = itertools.zip_longest(*samples)
        return [delta for turn in turns for delta in turn if delta is not None]

    def _rejection(self, last: Delta, feasible: Feasible) -> Delta:
        delta = without_tokens(last)
        assert delta.output is not None
        metrics = replace(METRICS, objective=self._objective, attained=False)
        output = replace(
            delta.output,
            finish_reason="error",
            error="the objective cannot be attained",
            error_field="unattainable",
            feasible=feasible,
            metrics=metrics,
        )
        return replace(delta, finish_reason="error", output=output)

    def _sample(self, params: Any, index: int, prompt: str | Sequence[int]) -> list[Delta]:
        def logprobs(ids: Sequence[int]) -> list[TokenLogprobs] | None:
            return None if params.logprobs is None else logprobs_of(ids, params.logprobs)

        runs = self.runs or RUNS
        deltas = [
            Delta(text=text, token_ids=ids, index=index, logprobs=logprobs(ids))
            for text, ids in runs
        ]
        ids = list(itertools.chain.from_iterable(ids for _, ids in runs))
        fails = self.error is not None and index == params.n - 1
        read = prompt_logprobs_of(prompt, params.prompt_logprobs)
        output = RequestOutput(
            text="".join(text for text, _ in runs),
            token_ids=ids,
            finish_reason="error" if fails and self.ends != "engine_dead" else self.ends,
            error=self.error if fails else None,
            error_field="structure" if fails and "structure" in str(self.error) else None,
            metrics=METRICS,
            seed=7,
            index=index,
            logprobs=logprobs(ids),
            prompt_logprobs=read,
            stop_reason=self.stop_reason,
        )
        ending = replace(deltas[-1], finish_reason=output.finish_reason, output=output)
        whole = [*deltas[:-1], ending]
        return [replace(whole[0], prompt_logprobs=read), *whole[1:]]


class FakeEngine:
    """Every step brings each request one token, `first_token` of the sample plus its index."""

    first_token = 11
    max_request_tokens = 100_000

    def __init__(self, *_: Any) -> None:
        self.running: list[RunningRequest] = []
        self.seen: list[RunningRequest] = []
        self.guard = HangGuard(60.0)
        self.slo_accounts = SloAccounts()

    def predicted_prefill_ms(self) -> float:
        return 1.0

    def baseline_tpot_ms(self) -> float:
        return BASELINE_TPOT_MS

    waiting = 0
    free_rows = 1000
    step_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def warm_up(self) -> None:
        pass

    awaited = ()
    unloadable: ClassVar[dict[str, str]] = {}

    def await_drafters(self) -> None:
        pass

    def can_ever_fit(self, tokens: int) -> bool:
        return tokens <= self.max_request_tokens

    def enqueue(self, request: RunningRequest) -> None:
        self.running.append(request)
        self.seen.append(request)

    def step(self) -> None:
        time.sleep(0.001)  # a long request must not be over before it is cancelled
        for request in list(self.running):
            if request.handle.is_cancelled:
                self._end(request, "cancelled")
                continue
            token = self.first_token + request.spec.sample
            delta = request.accept([token], ("big",), [TokenLogprobs(token, -1.0)])
            if request.finished:
                self.running.remove(request)
            request.handle.deliver(delta)

    def cancel_all(self) -> None:
        for request in list(self.running):
            self._end(request, "cancelled")

    def abandon(self, cause: str, others: Sequence[RunningRequest] = ()) -> None:
        for request in list(self.running):
            self._end(request, "engine_dead", cause)

    def _end(self, request: RunningRequest, reason: FinishReason, error: str | None = None) -> None:
        self.running.remove(request)
        request.handle.deliver(request.finish(reason, error))


def router_without_models(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> tuple[ChainRouter, FakeEngine]:
    """A real router with that engine; the tokenizer's id 0 ends a text. Close it."""
    engine = FakeEngine()
    pool = SimpleNamespace(
        plan=lambda _: PLAN,
        draft_only=(),
        target="big",
        bits_depend_on=None,
        names=("small", "big"),
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        unused_ids=(),
        eos_token_ids=frozenset({0}),
        get=lambda name: None,
    )
    monkeypatch.setattr("specrouter.router.Engine", lambda *_: engine)
    monkeypatch.setattr("specrouter.router.ModelPool.from_config", lambda *_, **__: pool)
    models = [{"name": name, "source": f"path:/none/{name}"} for name in pool.names]
    return ChainRouter.from_config({"pool": {"target": pool.target, "models": models}}), engine
