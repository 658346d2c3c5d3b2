"""Conversations on a service that keeps prefixes, against one that reads every prompt anew.

Turn after turn repeats what was said; some share their beginnings, some come twice at once. Memory
is short, so prefixes and rows go; rows are taken back at random, requests are cancelled, and
tenants have salts of their own. No token may differ in float64, and nobody may be given what only
another tenant has asked for.
"""

import contextlib
import copy
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from checks.exact.arrangement import Arrangement, modes_of
from checks.exact.losses import losing_models
from checks.exact.report import Progress, finish, make_parser, prepare
from specrouter import ChainRouter, RequestOutput, SamplingParams
from specrouter.request.spec import SpeculationOverride
from test_support.families import SAVERS, pool_settings, save_family
from test_support.params import greedy_params, seeded_params
from test_support.preemption import preempting_router

MAX_MODEL_LEN, NEW_TOKENS, MOST_TURNS = 512, 12, 5
ROWS, BLOCKS = 6, 14  # of 128 tokens: three or four of the longest requests
TOGETHER = 9  # conversations at a time
IDS = 300  # that prompts are made of
SALTS = ("a", "b", None)  # None: without the cache
PREEMPTED = 0.04  # of the running rows, in each cycle
CANCELLED = 0.1  # of the requests
_LOSSES = "chance of a cycle that a model is lost before it"


@dataclass
class Served:
    """A request as it was served. `is_partial`: it was cancelled."""

    prompt: tuple[int, ...]
    params: SamplingParams
    outputs: list[RequestOutput]
    is_partial: bool = False


@dataclass
class Conversation:
    """`text`: the prompt of its next turn."""

    number: int
    salt: str | None
    text: list[int]
    turns: int


@dataclass(kw_only=True)
class Figures:
    """What a run met. `texts`: by salt, what may be known of earlier requests."""

    requests: int = 0
    cancelled: int = 0
    differing: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    cached: Counter[str] = field(default_factory=Counter)
    texts: dict[str | None, list[tuple[int, ...]]] = field(default_factory=dict)


def settings_of(paths: dict[str, Path], dtype: str) -> dict[str, Any]:
    """Of the router that reads everything."""
    pool = pool_settings(paths, dtype)
    pool["models"].append({"name": "ngram", "source": "ngram"})
    engine = {"max_requests": ROWS, "max_model_len": MAX_MODEL_LEN, "prefill_chunk": 48}
    return {"pool": pool, "engine": engine | {"prefix_cache": False, "admission": "fcfs"}}


@contextlib.contextmanager
def routers(paths: dict[str, Path], dtype: str) -> Iterator[tuple[ChainRouter, ChainRouter]]:
    """One that reads everything, and one that keeps what fits in little memory."""
    settings = settings_of(paths, dtype)
    with ChainRouter.from_config(settings) as cold:
        names = list(cold.pool.models)
        per_token = sum(cold.pool.plan(name).footprint.kv_bytes_per_token for name in names)
        warm_settings = copy.deepcopy(settings)
        memory = f"{BLOCKS * 128 * per_token}B"
        warm_settings["engine"] |= {"prefix_cache": True, "kv_memory": memory}
        with ChainRouter.from_config(warm_settings) as warm:
            yield cold, warm


def begin(number: int) -> Conversation:
    """Every third one begins as others do, as with a system prompt."""
    draws = np.random.default_rng(number)
    common = np.random.default_rng(number % 2).integers(0, IDS, 140).tolist()
    own = draws.integers(0, IDS, int(draws.integers(2, 160))).tolist()
    salt = SALTS[int(draws.integers(0, 8)) % 4 % 3]
    text = [*common, *own] if number % 3 else own
    return Conversation(number, salt, text, int(draws.integers(1, MOST_TURNS + 1)))


def params_of(index: int, one: Conversation) -> SamplingParams:
    """All sampling parameters in turn; some with log-probabilities, some for two samples."""
    made = seeded_params(index, NEW_TOKENS) if index % 3 else greedy_params(index, NEW_TOKENS)
    asked: dict[str, Any] = {"prefix_cache": one.salt is not None, "cache_salt": one.salt}
    if index % 11 == 0:
        asked |= {"prompt_logprobs": 0}
    if index % 5 == 0:
        asked |= {"n": 2}
    return replace(made, **asked)


def serve(
    router: ChainRouter, turns: Sequence[Conversation], first: int, mode: Arrangement
) -> list[Served]:
    """A turn of each conversation, together. `first`: index of the first one's parameters."""
    draws = np.random.default_rng(first)
    pending = []
    for at, one in enumerate(turns):
        params = params_of(first + at, one)
        speculation = mode.speculation_of(at)
        pending.append((one, params, router.submit_all(one.text, params, speculation)))
    served = []
    for one, params, handles in pending:
        is_partial = bool(draws.random() < CANCELLED)
        if is_partial:
            for handle in handles:
                handle.cancel()
        outputs = [handle.result(600) for handle in handles]
        served.append(Served(tuple(one.text), params, outputs, is_partial))
    return served


def run(warm: ChainRouter, requests: int, figures: Figures) -> list[Served]:
    """That many requests at least, through every mode in turn."""
    modes = [Arrangement(mode=mode, batch=ROWS, depth=4, width=2) for mode in modes_of(warm)]
    progress, served = Progress("prefix", requests), list[Served]()
    number, open_ones = 0, list[Conversation]()
    while len(served) < requests:
        while len(open_ones) < TOGETHER:
            open_ones.append(begin(number))
            number += 1
        mode = modes[len(served) // TOGETHER % len(modes)]
        came = serve(warm, open_ones, len(served), mode)
        for one, each in zip(open_ones, came, strict=True):
            note(figures, one, each)
            draws = np.random.default_rng(len(served) + one.number)
            said = draws.integers(0, IDS, int(draws.integers(1, 40))).tolist()
            one.text = [*one.text, *each.outputs[0].token_ids, *said]
            one.turns -= 1
            progress(f"{warm.instruments.engine_state().cache.hits} hits")
        longest = MAX_MODEL_LEN - 2 * NEW_TOKENS
        open_ones = [one for one in open_ones if one.turns and len(one.text) < longest]
        served += came
    return served


def note(figures: Figures, one: Conversation, served: Served) -> None:
    """What a request was given, and whether others of its salt can have left it."""
    known = figures.texts.setdefault(one.salt, [])
    cached = served.outputs[0].metrics.cached_tokens
    known.append((*served.prompt, *served.outputs[0].token_ids))
    # Those of the same round run beside it: what they have left is looked at when all have ended.
    figures.cached[f"salt {one.salt}"] += cached
    if one.salt is None and cached:
        figures.leaked.append(f"{cached} tokens without the cache")
    figures.requests += len(served.outputs)
    figures.cancelled += served.is_partial


def find_leaks(figures: Figures, served: Sequence[Served]) -> None:
    """What was inherited stands in a text of the same salt."""
    for each in served:
        cached, salt = each.outputs[0].metrics.cached_tokens, each.params.cache_salt
        others = figures.texts[salt]
        begun = each.prompt[:cached]
        if cached and sum(text[:cached] == begun for text in others) < 2 and each.params.n == 1:
            figures.leaked.append(f"{cached} tokens that nobody else has under {salt!r}")


def compare(cold: ChainRouter, served: Sequence[Served], figures: Figures) -> None:
    """Each request again, alone of its kind: read whole, decoded by the target."""
    off: SpeculationOverride = "off"
    progress = Progress("cold", len(served))
    for start in range(0, len(served), TOGETHER):
        part = served[start : start + TOGETHER]
        handles = [cold.submit_all(each.prompt, each.params, off) for each in part]
        for each, pending in zip(part, handles, strict=True):
            for output, handle in zip(each.outputs, pending, strict=True):
                wanted = handle.result(600)
                why = difference(output, wanted)
                if why:
                    figures.differing.append(f"{len(each.prompt)} tokens of prompt: {why}")
            progress()


def difference(output: RequestOutput, wanted: RequestOutput) -> str:
    if output.finish_reason == "error" or wanted.finish_reason == "error":
        same = output.finish_reason == wanted.finish_reason
        return "" if same else f"{output.error} beside {wanted.error}"
    got = output.token_ids
    if output.finish_reason == "cancelled":
        return "" if got == wanted.token_ids[: len(got)] else "another beginning"
    if got != wanted.token_ids:
        return f"{got} instead of {wanted.token_ids}"
    ours, theirs = output.prompt_logprobs, wanted.prompt_logprobs
    if (ours is None) != (theirs is None) or len(ours or ()) != len(theirs or ()):
        return "other log-probabilities of the prompt"
    return ""


def check(
    directory: Path,
    dtype: str,
    requests: int,
    losses: float = 0.0,
    architecture: str = "llama",
) -> tuple[Figures, dict[str, Any]]:
    """`losses`: chance of a cycle that a model loses its state before it."""
    figures = Figures()
    with routers(save_family(directory, architecture), dtype) as (cold, warm):
        with preempting_router(warm, PREEMPTED) as disturbed, losing_models(warm, losses) as lost:
            served = run(warm, requests, figures)
        warm.instruments.check_integrity()
        find_leaks(figures, served)
        compare(cold, served, figures)
        state = warm.instruments.engine_state()
        counts = vars(state.cache)
        faults = {name: count for name, count in state.control_faults.items() if count}
    tokens = sum(len(output.token_ids) for each in served for output in each.outputs)
    return figures, {
        "architecture": architecture,
        "dtype": dtype,
        "requests": figures.requests,
        "output_tokens": tokens,
        "cancelled": figures.cancelled,
        "preemptions": disturbed.count,
        "lost": dict(lost),
        **counts,
        "control_faults": faults,
        "differing_requests": len(figures.differing),
        "differences": figures.differing[:5],
        "leaks": figures.leaked[:5],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="at least, in all")
    parser.add_argument("--dtypes", nargs="+", default=["float64"])
    parser.add_argument("--architecture", choices=SAVERS, default="llama")
    parser.add_argument("--losses", type=float, default=0.0, help=_LOSSES)
    given = parser.parse_args(arguments)
    prepare(given.threads)
    started = time.monotonic()
    reports, passed = [], True
    for dtype in given.dtypes:
        with tempfile.TemporaryDirectory() as directory:
            figures, report = check(
                Path(directory),
                dtype,
                given.requests,
                given.losses,
                given.architecture,
            )
        reports.append(report)
        passed &= not (figures.leaked or report["control_faults"])
        passed &= dtype != "float64" or not figures.differing
    return finish("prefix", passed, started, {"runs": reports})


if __name__ == "__main__":
    sys.exit(main())
