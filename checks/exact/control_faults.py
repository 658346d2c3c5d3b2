"""Faults in every function of the control plane, the drafters and the rows' bookkeeping, in turn.

Functions are found by introspection. Each is made to raise once, to raise always, to return NaN,
or to take 20 ms longer, while requests of all kinds run side by side. Afterwards the fault is gone.
Time is that of a clock which forwards move on, so one seed gives one play.

Contract of a burst: every request ends once. A fault of the control plane or of a drafter ends
none of them, one of a row's own code ends that row's request and no other; what was told is the
beginning of the right text, and all of it where the request did not fail. The service goes on
without a restart, its state is whole, and drafters are used again. Only functions of `TERMINAL` may
do more: they end what runs with an error, and the engine begins anew.

A failure names its function and mode: `--only NAME --mode MODE` plays that one alone.
"""

import dataclasses
import functools
import importlib
import inspect
import logging
import pkgutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from checks.exact.comparison import assert_whole
from checks.exact.fault_injection import InjectedFault
from checks.exact.models import pool_settings, save_family
from checks.exact.report import Progress, finish, make_parser, prepare
from modelpool.forward import ForwardOutput
from modelpool.packed_model import PackedModel
from specrouter import (
    SLO,
    ChainRouter,
    EngineDeadError,
    RequestHandle,
    RequestOutput,
    SamplingParams,
    Speculation,
    Structure,
    router,
)
from specrouter.execution import model_times
from specrouter.execution.time_profile import profile_model
from specrouter.request.running import RunningRequest

Mode = Literal["once", "always", "nan", "sleep"]
MODES: tuple[Mode, ...] = get_args(Mode)
Kind = Literal["control", "row", "terminal"]

# What is looked through: modules, and packages with their modules.
_PLACES = (
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
_OURS = ("processors", "specrouter", "statemgr", "modelpool", "tests", "checks", "__main__")
# By the beginning of a function's full name: what the service cannot do without. A fault here ends
# what runs with an error, and the engine begins anew. Everything else is guarded.
TERMINAL = (
    # The step loop, its guards, and its plan without policies.
    "specrouter.engine.admission_queue.AdmissionQueue.push",
    "specrouter.engine.admission_queue.AdmissionQueue.take_out",
    "specrouter.engine.engine.Engine.enqueue",
    "specrouter.engine.engine.Engine.has_work",
    "specrouter.engine.engine.Engine.step",
    "specrouter.engine.engine_thread.EngineThread._",
    "specrouter.engine.planning.target_alone",
    "specrouter.engine.step.DecodingStep._alone",
    "specrouter.engine.step.DecodingStep._first_come",
    "specrouter.engine.step.DecodingStep._note_room",
    "specrouter.engine.step.DecodingStep._run",
    "specrouter.engine.step.DecodingStep.run",
    "specrouter.execution.fault_guard.FaultGuard",
    "specrouter.execution.executor.Executor.unread",
    # The target's stage: its pack, its verification, and what is committed of it.
    "specrouter.execution.commit_stage.CommitStage._sound_paths",
    "specrouter.execution.commit_stage.CommitStage.commit",
    "specrouter.execution.executor.Executor._offered",
    "specrouter.execution.executor.Executor.run",
    "specrouter.execution.target_stage.TargetStage._positions",
    "specrouter.execution.target_stage.TargetStage._verified",
    "specrouter.execution.target_stage.TargetStage.verify",
    "processors.pack",
    "processors.pack",
    "processors.token_tree.TokenTree.routes",
    "processors.token_tree.TokenTree.empty",
    "processors.token_tree.TokenTree.is_path",
    "processors.token_tree.TokenTree.real",
    "processors.token_tree._follow",
    "processors.token_tree.join",
    "processors.verify.VerifyProcessor.verify",
    "processors.verify._by_row",
    "processors.verify._places",
    "processors.verify._plan",
    "processors.verify_result.VerifyResult.fed",
    "processors.verify_result.VerifyResult.poisoned",
    # Delivery.
    "specrouter.engine.step.DecodingStep._deliver",
    "specrouter.engine.step._delta_of",
    "specrouter.engine.request_book.RequestBook.admit",
    "specrouter.engine.request_book.RequestBook._give_rows",
    "specrouter.engine.request_book.RequestBook.conclude",
    "specrouter.engine.request_book.RequestBook.end",
    "specrouter.engine.request_book.RequestBook._tell",
    "specrouter.engine.request_book.RequestBook.retire",
    "specrouter.engine.request_book._why_it_leaves",
    "specrouter.request.handle.RequestHandle._hand_over",
    "specrouter.request.handle.RequestHandle.deliver",
    "specrouter.request.handle.RequestHandle.is_done",
    # State: the state manager, and what keeps models' states and committed tokens in step.
    "specrouter.execution.executor.Executor.allocate",
    "specrouter.execution.executor.Executor.close",
    "specrouter.execution.model_states.ModelStates._",
    "specrouter.execution.model_states.ModelStates.begin",
    "specrouter.execution.model_states.ModelStates.cycle",
    "specrouter.execution.model_states.ModelStates.forget_evicted",
    "specrouter.execution.model_states.ModelStates.lag",
    "specrouter.execution.model_states.ModelStates.settle",
    "specrouter.execution.model_states.ModelStates.stage",
    "specrouter.execution.model_states.ModelStates.touch",
    "processors.rollback.RollbackProcessor.rollback",
)
# What belongs to one row: a fault here may end that row's request, or have it refused.
ROW = (
    "specrouter.engine.admission_queue.AdmissionQueue.remove",
    "specrouter.engine.context_limit",
    "specrouter.engine.engine.Engine._looked_up",
    "specrouter.engine.engine.Engine.baseline_tpot_ms",
    "specrouter.engine.engine.Engine.can_ever_fit",
    "specrouter.engine.engine.Engine.free_rows",
    "specrouter.engine.engine.Engine.predicted_prefill_ms",
    "specrouter.engine.engine.Engine.waiting",
    "specrouter.engine.engine_thread.EngineThread.",
    "specrouter.engine.input_validation",
    "specrouter.execution.commit_stage",
    "specrouter.execution.decoding_rows",
    "specrouter.execution.executor.Executor.open",
    "specrouter.execution.logprobs",
    "specrouter.execution.target_stage.TargetStage._earlier",
    "specrouter.execution.target_stage.TargetStage._with_earlier",
    "specrouter.request",
    "processors.contexts",
    "processors.grammar",
    "processors.logits",
    "processors.noise",
    "processors.row_noise",
    "processors.sampler",
    "processors.sampling_row",
    "processors.score_edits",
    "processors.shared_noise",
    "processors.token_tree",
    "processors.verify",
)
# What no router here uses, and what is the caller's own.
_LEFT_OUT = ("specrouter.request.handle.RequestHandle.result",)

TEXTS = "texts"  # the member that drafts from texts, without weights
# What takes time on a `MachineClock`: forwards, and a look at it. Drafts pay clearly: where the
# target alone is about as fast, the scheduler leaves drafters out with good reason.
_TARGET_S, _DRAFTER_S, _LOOK_S = 8e-3, 1e-3, 1e-5
_SLEEP_S, _SLEEPS = 0.02, 8
_LATEST_CALL = 6  # the first call that "once" may strike
_PATIENCE_S = 60.0
# Rounds of requests in which drafters are to be used again: about as many cycles as it takes until
# half of what was learned in the burst has faded (`evidence.HALF_LIFE`).
_RECOVERIES = 16
_SHOWN = 8


@dataclass(frozen=True)
class Target:
    """A function: an attribute of a class, or of every module that imported it."""

    name: str
    owner: Any  # the class or module that defines it
    attribute: str

    @property
    def kind(self) -> Kind:
        if self.name.startswith(TERMINAL):
            return "terminal"
        return "row" if self.name.startswith(ROW) else "control"


def find_functions(left_out: tuple[str, ...] = _LEFT_OUT) -> list[Target]:
    """All, by name, but for those that Python itself calls, and those that begin so."""
    found = []
    for module in _modules():
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                found.append(Target(f"{module.__name__}.{name}", module, name))
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                found += _methods(module.__name__, value)
    kept = [one for one in found if not one.name.startswith(left_out)]
    return sorted(kept, key=lambda one: one.name)


def _modules() -> Iterator[Any]:
    for place in _PLACES:
        module = importlib.import_module(place)
        yield module
        for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
            yield importlib.import_module(f"{place}.{info.name}")


def _importers() -> list[Any]:
    """Modules that may have imported a function of ours: to look through all takes 25 ms."""
    names = [name for name in sys.modules if name.partition(".")[0] in _OURS]
    return [sys.modules[name] for name in names]


def _methods(module: str, owner: type) -> Iterator[Target]:
    kinds = (property, functools.cached_property, classmethod, staticmethod)
    if getattr(owner, "_is_protocol", False) or issubclass(owner, BaseException):
        return
    for name, value in vars(owner).items():
        if name.startswith("__") or not (inspect.isfunction(value) or isinstance(value, kinds)):
            continue
        yield Target(f"{module}.{owner.__name__}.{name}", owner, name)


class Fault:
    """A function that misbehaves while it is `armed`."""

    def __init__(
        self,
        target: Target,
        mode: Mode,
        strikes: int = 1,
        *,
        spoil: Callable[[Any], Any] | None = None,
        passes: Callable[[float], object] = time.sleep,
    ) -> None:
        """Args:
        strikes: the call that fails, in mode "once".
        spoil: what mode "nan" makes of a result, by default `without_numbers`.
        passes: lets seconds pass, in mode "sleep".
        """
        self.target = target
        self.mode = mode
        self.calls = 0
        self.fired = 0
        self._strikes = strikes
        self._spoil = spoil or without_numbers
        self.only: int | None = None  # the one call that mode "nan" spoils
        self._passes = passes
        self._lock = threading.Lock()

    @contextmanager
    def armed(self) -> Iterator[None]:
        owner, name = self.target.owner, self.target.attribute
        original = vars(owner)[name]
        with ExitStack() as stack:
            if inspect.isclass(owner):
                stack.enter_context(mock.patch.object(owner, name, self._replaced(original)))
            else:
                changed = self._around(original)
                for module in _importers():
                    for alias, value in list(vars(module).items()):
                        if value is original:
                            stack.enter_context(mock.patch.object(module, alias, changed))
            yield

    def _replaced(self, original: Any) -> Any:
        if isinstance(original, property):
            return property(self._around(original.fget))
        if isinstance(original, functools.cached_property):
            return property(self._around(original.func))  # a kept value would outlast the fault
        if isinstance(original, classmethod | staticmethod):
            return type(original)(self._around(original.__func__))
        return self._around(original)

    def _around(self, original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def changed(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.calls += 1
                call = self.calls
            if self.mode == "always" or (self.mode == "once" and call == self._strikes):
                self.fired += 1
                raise InjectedFault(self.target.name)
            if self.mode == "sleep" and call <= _SLEEPS:
                self.fired += 1
                self._passes(_SLEEP_S)
            value = original(*arguments, **options)
            if self.mode != "nan" or self.only not in (None, call):
                return value
            spoilt = self._spoil(value)
            self.fired += spoilt is not value
            return spoilt

        return changed


def without_numbers(value: Any, depth: int = 0) -> Any:
    """The value with NaN for its floats, and for a number that is all of it; else itself."""
    if isinstance(value, bool | None):
        return value
    if isinstance(value, float) or (isinstance(value, int) and not depth):
        return float("nan")
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return np.full_like(value, np.nan)
    if isinstance(value, Tensor) and value.dtype.is_floating_point:
        return torch.full_like(value, torch.nan)
    if depth > 3:
        return value
    deeper = functools.partial(without_numbers, depth=depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _without_numbers_in_fields(value, deeper)
    if type(value) in (list, tuple):
        found = [deeper(one) for one in value]
        return value if all(map(lambda a, b: a is b, found, value)) else type(value)(found)
    if type(value) is dict:
        spoilt = {key: deeper(one) for key, one in value.items()}
        return value if all(spoilt[key] is value[key] for key in value) else spoilt
    return value


def _without_numbers_in_fields(value: Any, deeper: Callable[[Any], Any]) -> Any:
    """Of frozen values only: what may change is shared with others."""
    if not value.__dataclass_params__.frozen:
        return value
    fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
    spoilt = {name: deeper(one) for name, one in fields.items()}
    changed = {name: one for name, one in spoilt.items() if one is not fields[name]}
    try:
        return dataclasses.replace(value, **changed) if changed else value
    except Exception:  # it refuses such values
        return value


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


class MachineClock:
    """In the place of `time.perf_counter`, by which the engine measures: drafters are as fast,
    beside the target, on any machine, whatever else runs there."""

    def __init__(self) -> None:
        self._now_s, self._lock = 0.0, threading.Lock()

    def __call__(self) -> float:
        return self.passes(_LOOK_S)

    def passes(self, seconds: float) -> float:
        with self._lock:
            self._now_s += seconds
            return self._now_s


@contextmanager
def even_machine() -> Iterator[MachineClock]:
    """Forwards take the clock's time, and so does all that is measured."""
    clock, original = MachineClock(), PackedModel.forward

    def forward(model: PackedModel, *arguments: Any, **options: Any) -> ForwardOutput:
        output = original(model, *arguments, **options)
        clock.passes(_TARGET_S if model.name == "target" else _DRAFTER_S)
        return output

    with (
        mock.patch.object(PackedModel, "forward", forward),
        mock.patch.object(time, "perf_counter", clock),
        # Their own clocks are bound when they are imported.
        mock.patch.object(router, "RunningRequest", functools.partial(RunningRequest, clock=clock)),
        mock.patch.object(
            model_times, "profile_model", functools.partial(profile_model, clock=clock)
        ),
    ):
        yield clock


class Service:
    """A router on an `even_machine`, and what its requests answer when nothing fails."""

    def __init__(self, paths: dict[str, Path], clock: MachineClock) -> None:
        self._paths = paths
        self.clock = clock
        self.cases = make_cases()
        self.rounds: Counter[int] = Counter()  # after a fault, until drafters were used
        self.router = self._open()
        self.references = [
            self.router.generate([one.prompt], one.params, "off")[0] for one in self.cases
        ]

    def _open(self) -> ChainRouter:
        pool = pool_settings(self._paths)
        pool["models"].append({"name": TEXTS, "source": "suffix"})
        engine = {
            "max_requests": 4,
            "max_model_len": 192,
            "prefill_chunk": 32,
            "step_timeout_s": 30.0,
        }
        return ChainRouter.from_config({"pool": pool, "engine": engine})

    @functools.cached_property
    def runs(self) -> list[tuple[Target, Mode]]:
        """The functions that a burst calls at all, in each mode that changes anything: of "nan"
        those whose results have numbers; of what ends the service, as it should, once."""
        numbers = set[str]()

        def looked(name: str, value: Any) -> Any:
            if name not in numbers and without_numbers(value) is not value:
                numbers.add(name)
            return value

        faults = [
            Fault(target, "nan", spoil=functools.partial(looked, target.name))
            for target in find_functions()
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
            if one.calls
            and (mode != "nan" or one.target.name in numbers)
            and (mode == "once" or one.target.kind != "terminal")
        ]

    def reopen(self) -> None:
        self.close()
        self.router = self._open()

    def close(self) -> None:
        self.router.close(1.0)

    def play(self, fault: Fault) -> Counter[str]:
        """A burst with a fault, and what comes after it. How requests ended. Raises
        `AssertionError` for what goes wrong."""
        kind, mode = fault.target.kind, fault.mode
        with fault.armed():
            endings, outputs = self._serve()
        failed = endings["error"] + endings["refused"]
        if kind == "control" or not fault.fired or mode == "sleep":
            assert not failed, f"{failed} requests ended: {_errors(outputs)}"
        elif kind == "row" and mode == "once":
            assert failed <= 1, f"{failed} requests ended: {_errors(outputs)}"
        if kind == "terminal" and not self.router.is_healthy:
            self.close()
            self.router = self._open()
        assert self.router.is_healthy, f"the service stopped: {self.router.failure}"
        if fault.fired or failed:
            self._recover()
        return endings

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
        for done in range(1, _RECOVERIES + 1):
            endings, outputs = self._serve()
            assert not endings["error"] + endings["refused"], f"still fails: {_errors(outputs)}"
            if self._drafted(outputs):
                assert_whole(self.router)
                self.rounds[done] += 1
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


def _errors(outputs: Sequence[RequestOutput]) -> str:
    return "; ".join(sorted({output.error for output in outputs if output.error}))


@dataclass(kw_only=True)
class ControlFaultCheck:
    """Plays faults one after the other, and counts."""

    service: Service
    bursts: int = 0
    fired: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def play(self, target: Target, mode: Mode, seed: int) -> None:
        rng = np.random.default_rng([seed, MODES.index(mode), len(target.name)])
        for strikes in (int(rng.integers(1, _LATEST_CALL)), 1):
            fault = Fault(target, mode, strikes, passes=self.service.clock.passes)
            try:
                endings = self.service.play(fault)
            except Exception as error:
                self.failures.append(f"{target.name} {mode}: {type(error).__name__}: {error}")
                print(self.failures[-1], file=sys.stderr, flush=True)
                self.service.reopen()
                endings = Counter()
            self.bursts += 1
            self.fired += fault.fired > 0
            self.endings.update(endings)
            if fault.fired or mode != "once" or fault.calls == 0 or strikes == 1:
                return

    def figures(self) -> dict[str, object]:
        return {
            "bursts": self.bursts,
            "bursts_with_a_fault": self.fired,
            "requests": sum(self.endings.values()),
            "endings": dict(self.endings),
            "rounds_until_drafted": dict(sorted(self.service.rounds.items())),
            "failures": len(self.failures),
            "examples": self.failures[:_SHOWN],
        }


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__, threads=1)
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--only", default="", help="functions whose name holds this")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    prepare(options.threads)
    logging.disable(logging.CRITICAL)  # a traceback for each fault
    started = time.monotonic()
    with TemporaryDirectory() as directory, even_machine() as clock:
        service = Service(save_family(Path(directory), noise=0.02), clock)
        modes = options.mode or MODES
        runs = [
            (target, mode)
            for target, mode in service.runs
            if options.only in target.name and mode in modes
        ]
        check, progress = ControlFaultCheck(service=service), Progress("control faults", len(runs))
        for target, mode in runs:
            check.play(target, mode, options.seed)
            progress(f"{len(check.failures)} failed")
        service.close()
    figures = {"called": len({target.name for target, _ in runs}), **check.figures()}
    return finish("control faults", not check.failures, started, figures)


if __name__ == "__main__":
    sys.exit(main())
