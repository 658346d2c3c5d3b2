"""A few requests that join, leave and are cancelled at random times, and what they must say.

Contract: a burst is drawn from a generator, so a seed names it; only the engine's timing is its
own. `play` raises `AssertionError`, with the request's plan, for the first wrong output.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from checks.exact.arrangement import OBJECTIVES
from checks.exact.comparison import Case
from checks.exact.oracle import Oracle
from specrouter import ChainRouter, RequestHandle, RequestOutput, SamplingParams, Speculation
from specrouter.request.objective import SloLike
from specrouter.request.params import Chain

LONGEST_PROMPT = 40
MOST_NEW_TOKENS = 24
_LATEST_START_S = 0.02
_LONGEST_WAIT_S = 0.03  # before a cancellation


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one client does. `cancel_after_s` None: it waits for the end."""

    case: Case
    speculation: Literal["off"] | Speculation | None
    slo: SloLike
    prefix_tokens: int  # of the reference, handed over as already generated
    start_s: float
    cancel_after_s: float | None
    streams: bool


def draw_cases(oracle: Oracle, count: int, rng: np.random.Generator) -> list[Case]:
    """Requests with random prompts and parameters, each with its reference."""
    return [_draw_case(oracle, rng) for _ in range(count)]


def draw_burst(
    cases: Sequence[Case], chains: Sequence[Chain], rng: np.random.Generator
) -> list[Plan]:
    """Two to six clients."""
    return [_draw_plan(cases, chains, rng) for _ in range(rng.integers(2, 7))]


def draw_shape(rng: np.random.Generator) -> tuple[int, int]:
    """Depth and width."""
    return int(rng.integers(1, 8)), int(rng.choice([1, 1, 2, 3, 4]))


def play(
    router: ChainRouter, plans: Sequence[Plan], evict: str | None, may_fail: bool
) -> list[RequestOutput]:
    """Plays all clients at once and checks what each was given.

    `evict` names a model to drop in the midst of it; `may_fail`: the target may fail, so
    requests may end with an error, with a correct beginning.
    """
    with ThreadPoolExecutor(len(plans)) as clients:
        playing = [clients.submit(_play_one, router, plan) for plan in plans]
        if evict is not None:
            time.sleep(_LATEST_START_S / 2)
            router.pool.evict(evict)
        outputs = [client.result() for client in playing]
    for plan, output in zip(plans, outputs, strict=True):
        _check(plan, output, may_fail)
    return outputs


def _draw_case(oracle: Oracle, rng: np.random.Generator) -> Case:
    prompt = rng.integers(0, oracle.vocab_size, size=rng.integers(1, LONGEST_PROMPT + 1))
    sampled = rng.random() < 0.6
    params = SamplingParams(
        max_new_tokens=int(rng.integers(1, MOST_NEW_TOKENS + 1)),
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.3])) if sampled else 0.0,
        top_k=int(rng.choice([0, 5, 40, 1000])),
        top_p=float(rng.choice([1.0, 0.9])),
        seed=int(rng.integers(0, 2**63 - 1)),
        stop_token_ids=tuple(rng.integers(0, oracle.vocab_size, size=rng.integers(0, 4)).tolist()),
        ignore_eos=bool(rng.random() < 0.5),
        min_p=float(rng.choice([0.0, 0.0, 0.05])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.2])),
        frequency_penalty=float(rng.choice([0.0, 0.0, 0.4])),
        logit_bias={int(rng.integers(oracle.vocab_size)): 2.0} if rng.random() < 0.3 else {},
        bad_words_ids=tuple(
            tuple(rng.integers(1, oracle.vocab_size, size=size).tolist())
            for size in ((1, 2) if rng.random() < 0.3 else ())
        ),
    )
    tokens = tuple(prompt.tolist())
    return Case(tokens, params, oracle.tokens(tokens, params))


def _draw_plan(cases: Sequence[Case], chains: Sequence[Chain], rng: np.random.Generator) -> Plan:
    case = cases[int(rng.integers(len(cases)))]
    speculation: Literal["off"] | Speculation | None = None
    kind = rng.random()
    if kind < 0.1:
        speculation = "off"
    elif kind < 0.75:
        chain = chains[int(rng.integers(len(chains)))]
        speculation = Speculation(chain, *draw_shape(rng))
    elif kind < 0.85:  # leaves the chain to the scheduler
        speculation = Speculation(None, *draw_shape(rng))
    resumes = rng.random() < 0.15
    cancels = rng.random() < 0.2
    return Plan(
        case=case,
        speculation=speculation,
        slo=OBJECTIVES[int(rng.integers(len(OBJECTIVES)))],
        prefix_tokens=int(rng.integers(len(case.reference))) if resumes else 0,
        start_s=float(rng.uniform(0, _LATEST_START_S)),
        cancel_after_s=float(rng.uniform(0, _LONGEST_WAIT_S)) if cancels else None,
        streams=bool(rng.random() < 0.5),
    )


def _play_one(router: ChainRouter, plan: Plan) -> RequestOutput:
    time.sleep(plan.start_s)
    prefix = plan.case.reference[: plan.prefix_tokens]
    handle = router.submit(
        plan.case.prompt,
        plan.case.params,
        speculation=plan.speculation,
        generated=prefix,
        slo=plan.slo,
    )
    if plan.cancel_after_s is not None:
        time.sleep(plan.cancel_after_s)
        handle.cancel()
        return handle.result(timeout=120)
    return _consume(handle, prefix) if plan.streams else handle.result(timeout=120)


def _consume(handle: RequestHandle, prefix: tuple[int, ...]) -> RequestOutput:
    """The output that the last delta holds, which must repeat all deltas."""
    deltas = list(handle)
    output = deltas[-1].output
    assert output is not None, "the last delta holds no output"
    streamed = prefix + tuple(token for delta in deltas for token in delta.token_ids)
    assert streamed == tuple(output.token_ids), f"streamed {streamed}, but {output.token_ids}"
    return output


def _check(plan: Plan, output: RequestOutput, may_fail: bool) -> None:
    case, tokens = plan.case, tuple(output.token_ids)
    seen = f"{output.finish_reason} {tokens} of {case.reference} ({output.error}) under {plan}"
    if output.finish_reason == "cancelled":
        assert plan.cancel_after_s is not None, f"nobody cancelled: {seen}"
    elif output.finish_reason == "error":
        assert may_fail, f"a drafter's failure ended a request: {seen}"
        assert output.error, f"an error without its cause: {seen}"
    else:
        assert tokens == case.reference, f"wrong tokens: {seen}"
        return
    assert tokens == case.reference[: len(tokens)], f"wrong beginning: {seen}"
