"""`specrouter bench turns`: the time to the first token in a conversation, with the prefix cache.

Every turn is sent twice, with the prefix cache and without, in alternating order. Conversations run
one after the other, each under its own salt.
"""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from modelpool.errors import ConfigError
from specrouter.bench.conditions import conditions, model_sizes
from specrouter.bench.contenders import MeasurementError
from specrouter.bench.prompts import BUILT_IN
from specrouter.config import RouterConfig
from specrouter.progress import Progress, ShownLoad
from specrouter.request.output import RequestOutput
from specrouter.request.params import SamplingParams
from specrouter.router import ChainRouter

WARM, COLD = "cached", "read whole"
_ROWS = 4  # of KV memory: for one request at a time, and for the cache of earlier ones


@dataclass(frozen=True)
class Turn:
    """A turn sent both ways: milliseconds to the first token, by way."""

    prompt_tokens: int
    cached_tokens: int
    ttft_ms: Mapping[str, float]


def bench_turns(
    options: argparse.Namespace, config: RouterConfig, progress: Progress
) -> dict[str, Any]:
    """Measure, and return the JSON document.

    Raises `MeasurementError` if a request fails, `ConfigError` if turns do not fit.
    """
    said_before = (options.turns - 1) * options.new_tokens + (options.turns - 2) * options.said
    if options.history <= said_before:
        reason = f"must be at least {said_before + 1}: so much is said before"
        raise ConfigError("--history", reason)
    longest = options.history + options.said + options.new_tokens
    length = max(config.engine.max_model_len or 0, longest)
    changes = {"max_model_len": length, "max_requests": _ROWS, "prefix_cache": True}
    config = config.model_copy(update={"engine": config.engine.model_copy(update=changes)})
    progress.note(f"loading {config.pool.target}")
    with ChainRouter.from_config(config, ShownLoad(progress)) as router:
        if router.limits.max_tokens < longest:
            most = router.limits.max_tokens
            reason = f"turns of {longest} tokens do not fit the models' {most}"
            raise ConfigError("--history", reason)
        progress.expect((1 + options.chats) * options.turns)
        first = options.history - said_before
        chats = [_chat(router, options, first, at, progress) for at in range(-1, options.chats)]
        turns = zip(*chats[1:], strict=True)  # the first chat warms up
        return {
            "conditions": conditions(router),
            "chats": options.chats,
            "new_tokens": options.new_tokens,
            "turns": [{"turn": number, **_medians(own)} for number, own in enumerate(turns, 1)],
        }


def turns_table(document: Mapping[str, Any]) -> str:
    lines = [
        model_sizes(document["conditions"]),
        f"{document['chats']} chats, one at a time; medians",
        "",
        f"{'turn':>4}{'prompt':>8}{'cached':>8}{'TTFT cached':>13}{'read whole':>12}{'ratio':>8}",
    ]
    for row in document["turns"]:
        lines.append(
            f"{row['turn']:>4}{row['prompt_tokens']:>8.0f}{row['cached_tokens']:>8.0f}"
            f"{row['ttft_ms'][WARM]:>10.0f} ms{row['ttft_ms'][COLD]:>9.0f} ms{row['ratio']:>8.3f}"
        )
    return "\n".join(lines)


def _chat(
    router: ChainRouter, options: argparse.Namespace, first: int, chat: int, progress: Progress
) -> list[Turn]:
    """Run one conversation; `first` is the length of its first prompt in tokens."""
    draws = np.random.default_rng([7, chat + 1])
    texts = itertools.chain.from_iterable(BUILT_IN.values())
    known = np.unique([token for text in texts for token in router.tokenizer(text)["input_ids"]])
    prompt = draws.choice(known, first).tolist()
    ways: dict[str, dict[str, Any]] = {
        WARM: {"cache_salt": f"chat {chat}"},
        COLD: {"prefix_cache": False},
    }
    turns = []
    for number in range(1, options.turns + 1):
        progress.show(f"chat {chat + 1}/{options.chats}, turn {number}")
        outputs = dict[str, RequestOutput]()
        for way in sorted(ways, reverse=chat % 2 == 1):
            params = SamplingParams(max_new_tokens=options.new_tokens, ignore_eos=True, **ways[way])
            [outputs[way]] = router.generate(prompt, params)
        ttft_ms = {way: _ttft_ms(output) for way, output in outputs.items()}
        warm = outputs[WARM]
        turns.append(Turn(len(prompt), warm.metrics.cached_tokens, ttft_ms))
        prompt = [*prompt, *warm.token_ids, *draws.choice(known, options.said).tolist()]
        progress.step()
    return turns


def _ttft_ms(output: RequestOutput) -> float:
    if output.error is not None or output.metrics.ttft_ms is None:
        raise MeasurementError(f"a turn failed: {output.error}")
    return output.metrics.ttft_ms


def _medians(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return medians of one turn over all chats; `ratio` is the median of the turns' ratios."""
    return {
        "prompt_tokens": median(turn.prompt_tokens for turn in turns),
        "cached_tokens": median(turn.cached_tokens for turn in turns),
        "ttft_ms": {way: median(turn.ttft_ms[way] for turn in turns) for way in (WARM, COLD)},
        "ratio": median(turn.ttft_ms[WARM] / turn.ttft_ms[COLD] for turn in turns),
    }
