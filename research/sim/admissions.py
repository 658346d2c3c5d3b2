"""The admissions of named policies on a simulated machine, which knows its times as they are."""

from collections.abc import Callable, Mapping

from research.policies.slos_serve import slos_serve, strict
from research.sim.baseline_admission import decode_first, prefill_first
from research.sim.machine import Machine
from research.sim.text import SimulatedTexts
from specrouter.config import EngineConfig
from specrouter.slo.admission import Admit, fcfs
from specrouter.slo.serve.amortized import Amortized
from specrouter.slo.serve.measured_pacing import measured_pacing
from specrouter.slo.serve.policy import MOST_ERROR, PacingOf, by_objectives

VLLM_TOKENS = 2048  # of prompts that vLLM reads in a batch, its default at the time


def admission_of(
    name: str,
    machine: Machine,
    texts: SimulatedTexts,
    batch_tokens: int | None = None,
) -> Admit:
    """`batch_tokens`: of Sarathi-Serve's batches; None: the machine's chunk."""
    chunk = machine.prefill_chunk

    def paced() -> PacingOf:
        if machine.stages:  # measured ones: as the engine plans with them
            engine = EngineConfig(prefill_chunk=chunk, max_requests=machine.max_requests)
            return measured_pacing(machine.target, chunk, engine.most_batch_tokens)
        return _pacing_of(machine, texts)

    def strictly() -> PacingOf:
        pacing_of = paced()
        return lambda view: strict(pacing_of(view))

    made: Mapping[str, Callable[[], Admit]] = {
        "fcfs": lambda: fcfs(chunk),
        "prefill-first": lambda: prefill_first(max(VLLM_TOKENS, chunk)),
        "decode-first": lambda: decode_first(batch_tokens or chunk),
        "research.policies:SLOS_SERVE": lambda: slos_serve(strictly(), chunk),
        "slo": lambda: by_objectives(paced(), chunk, most_error=MOST_ERROR),
    }
    return made[name]()


def _pacing_of(machine: Machine, texts: SimulatedTexts) -> PacingOf:
    """Speculative where there is a drafter. Nobody waits longer for others' prompts than a chunk of
    them takes."""
    times, chunk, alpha = machine.batch_times, machine.prefill_chunk, 0.0
    if machine.drafters:
        alpha = texts.of(machine.drafters[0], machine.target).acceptance

    pacing = Amortized(times, times.ms(chunk), alpha, chunk=chunk)
    return lambda view: pacing
