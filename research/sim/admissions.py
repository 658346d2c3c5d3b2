"""The admissions of named policies on a simulated machine, which knows its times as they are."""

from collections.abc import Callable, Mapping

from research.policies.slos_serve import slos_serve
from research.sim.baseline_admission import decode_first, prefill_first
from research.sim.machine import Machine
from research.sim.text import SimulatedTexts
from specrouter.config import EngineConfig
from specrouter.slo.admission import Admit, fcfs
from specrouter.slo.serve.measured_pacing import amortized, measured_pacing
from specrouter.slo.serve.pacing import Autoregressive, Pacing, Speculative
from specrouter.slo.serve.policy import PacingOf, by_objectives
from specrouter.view import LEAST_PACE_MARGIN

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
        pacing = _pacing(machine, texts)
        return lambda view: pacing

    made: Mapping[str, Callable[[], Admit]] = {
        "fcfs": lambda: fcfs(chunk),
        "prefill-first": lambda: prefill_first(max(VLLM_TOKENS, chunk)),
        "decode-first": lambda: decode_first(batch_tokens or chunk),
        "research.policies:SLOS_SERVE": lambda: slos_serve(paced(), chunk),
        "slo": lambda: by_objectives(amortized(paced(), chunk), chunk, never_behind=True),
    }
    return made[name]()


def _pacing(machine: Machine, texts: SimulatedTexts) -> Pacing:
    """Speculative where there is a drafter, with a margin of every TPOT for what a mean number of
    accepted tokens does not hold; none is published. Nobody waits longer for others' prompts than
    a chunk of them takes."""
    times = machine.batch_times
    idle_ms = times.ms(machine.prefill_chunk)
    if machine.drafters:
        alpha = texts.of(machine.drafters[0], machine.target).acceptance
        return Speculative(times, alpha, idle_ms, margin=LEAST_PACE_MARGIN)
    return Autoregressive(times, idle_ms)
