"""A fault in any function of the control plane, of the drafters or of the rows' bookkeeping.

Functions are found by introspection. Each is made to raise once, to raise always, to return NaN,
or to take 20 ms longer, while requests of all kinds run side by side. Afterwards the fault is gone.
Time is that of a clock which forwards move on, so one seed gives one play.

Contract: every request ends once; what it said is the beginning of the right text, and all of it
where it did not fail. Either the service stays healthy and uses drafters again, or it has ended.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specrouter import (
    SLO,
    ChainRouter,
    EngineDeadError,
    RequestHandle,
    RequestOutput,
    SamplingParams,
    Speculation,
    Structure,
)
from test_support.even_machine import MachineClock
from test_support.families import pool_settings, save_family
from test_support.function_faults import (
    MODES,
    Fault,
    Mode,
    Target,
    functions_in,
    without_numbers,
)
from test_support.routers import assert_whole

PLACES = (
    "specrouter.cycle",
    "specrouter.engine",
    "specrouter.execution",
    "specrouter.profile",
    "specrouter.request",
    "specrouter.routing",
    "specrouter.slo",
    "specrouter.view",
    "processors",
    "statemgr.output_store",
    "statemgr.suffix_index",
    "statemgr.suffix_table",
)
# What ends a request by raising is the caller's own.
LEFT_OUT = ("specrouter.request.handle.RequestHandle.result",)
TEXTS = "texts"  # the member that drafts from texts, without weights
_PATIENCE_S = 60.0
# Rounds of requests in which drafters are to be used again: about as many cycles as it takes until
# half of what was learned in the burst has faded (`evidence.HALF_LIFE`).
_RECOVERIES = 16


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    params: SamplingParams
    speculation: Literal["off"] | Speculation | None = None
    slo: SLO | None = None


def make_cases() -> list[Case]:
    """Requests that between them use all of a row's code."""
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(1, 300, size).tolist()) for size in (5, 9, 3, 12, 7, 70)]
    digits = Structure("regex", "[0-9 ]{3,40}")
    new: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    edited: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "logit_bias": {7: 1.0},
        "bad_words_ids": ((5,), (7, 9)),
        "min_tokens": 4,
        "stop_token_ids": (11,),
    }
    return [
        Case(prompts[0], SamplingParams(**new)),
        Case(
            prompts[1],
            SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=3, logprobs=2, **new),
            slo=SLO(tpot_ms=1000.0),
        ),
        Case(prompts[2], SamplingParams(structure=digits, max_new_tokens=16)),
        Case(prompts[3], SamplingParams(**new), Speculation((TEXTS, "target"), 4)),
        Case(
            prompts[4],
            SamplingParams(temperature=0.7, min_p=0.01, seed=4, prompt_logprobs=1, **new, **edited),
            Speculation(("small", "middle", "target"), 3, 2),
        ),
        Case(prompts[5], SamplingParams(stop=("qqqq",), **new), slo=SLO(tpot_ratio=2.0)),
    ]


class Service:
    """A router on an `even_machine`, and what its requests answer when nothing fails."""

    def __init__(self, directory: Path, clock: MachineClock) -> None:
        self._paths = save_family(directory, noise=0.02)
        self._clock = clock
        self.cases = make_cases()
        self.router = self._open()
        self.references = [
            self.router.generate([one.prompt], one.params, "off")[0] for one in self.cases
        ]

    def _open(self) -> ChainRouter:
        pool = pool_settings(self._paths)
        pool["models"].append({"name": TEXTS, "source": "suffix"})
        engine = {"max_requests": 4, "max_model_len": 192, "prefill_chunk": 32}
        engine["step_timeout_s"] = 30
        return ChainRouter.from_config({"pool": pool, "engine": engine})

    def close(self) -> None:
        self.router.close(1.0)

    def renew(self) -> None:
        """Forgets what was learned so far."""
        self.close()
        self.router = self._open()

    def runs(self) -> list[tuple[Target, Mode]]:
        """The functions that a burst calls at all, in each mode that changes anything: of "nan"
        those whose results have numbers."""
        numbers = set[str]()

        def looked(name: str, value: Any) -> Any:
            if name not in numbers and without_numbers(value) is not value:
                numbers.add(name)
            return value

        faults = [
            Fault(target, "nan", spoil=functools.partial(looked, target.name))
            for target in functions_in(PLACES, LEFT_OUT)
        ]
        with ExitStack() as stack:
            for fault in faults:
                stack.enter_context(fault.armed())
            for _ in range(2):  # the second finds what the first has left
                self._serve()
        return [
            (one.target, mode)
            for one in faults
            for mode in MODES
            if one.calls and (mode != "nan" or one.target.name in numbers)
        ]

    def play(self, target: Target, mode: Mode, seed: int = 0) -> tuple[Fault, Counter[str]]:
        """A burst with a fault, which strikes an early call, and what comes after it: how requests
        ended. Raises `AssertionError` for what goes wrong."""
        strikes = 1 + np.random.default_rng([seed, len(target.name)]).integers(5)
        fault = Fault(target, mode, int(strikes), passes=self._clock.passes)
        with fault.armed():
            endings, _ = self._serve()
        if not self.router.is_healthy:
            self.renew()
        if fault.fired:
            self._recover()
        return fault, endings

    def _serve(self) -> tuple[Counter[str], list[RequestOutput]]:
        endings: Counter[str] = Counter()
        handles: list[tuple[int, RequestHandle]] = []
        outputs = []
        with self.router._thread._wakeup:  # the engine finds all of them at once, in each play
            for index, case in enumerate(self.cases):
                try:
                    handle = self.router.submit(
                        case.prompt, case.params, speculation=case.speculation, slo=case.slo
                    )
                except Exception:
                    endings["refused"] += 1
                else:
                    handles.append((index, handle))
        for index, handle in handles:
            output = _ended(handle)
            outputs.append(output)
            endings[output.finish_reason] += 1
            self._check(index, output)
        return endings, outputs

    def _check(self, index: int, output: RequestOutput) -> None:
        wanted = self.references[index]
        made = output.token_ids
        if output.finish_reason in ("error", "engine_dead"):
            assert output.error, "an error without its cause"
            assert made == wanted.token_ids[: len(made)], f"a wrong beginning of case {index}"
            return
        assert made == wanted.token_ids, f"wrong tokens of case {index}: {made}"
        assert output.text == wanted.text, f"a wrong text of case {index}"
        assert output.finish_reason == wanted.finish_reason, f"a wrong end of case {index}"

    def _recover(self) -> None:
        """Without the fault all is right, and drafters are used as before."""
        assert_whole(self.router)
        for _ in range(_RECOVERIES):
            endings, outputs = self._serve()
            failed = {output.error for output in outputs if output.error}
            assert not endings["error"] + endings["refused"], f"still fails: {failed}"
            if self._drafted(outputs):
                assert_whole(self.router)
                return
        raise AssertionError("drafters are not used again")

    def _drafted(self, outputs: Sequence[RequestOutput]) -> bool:
        """Somebody drafts for requests that name no chain, be it from what was said before, and
        each chain that is named is used whole."""
        scheduled, named = False, True
        for case, output in zip(self.cases, outputs, strict=True):
            chains = output.metrics.chains
            if case.speculation is None:
                scheduled |= any(len(chain) > 1 for chain in chains)
            elif isinstance(case.speculation, Speculation):
                named &= case.speculation.chain in chains
        return scheduled and named


def _ended(handle: RequestHandle) -> RequestOutput:
    """How a request ended, be it with its engine."""
    try:
        return handle.result(_PATIENCE_S)
    except EngineDeadError as error:
        if error.output is None:
            raise
        return error.output
