"""`specrouter bench turns`: the time to the first token in a conversation, with the prefix cache.

Every turn is asked twice, with what is cached and read whole, in alternating order. Conversations
come one after the other, each under a salt of its own.
"""

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelpool.errors import ConfigError
from specrouter.bench.conditions import conditions
from specrouter.bench.options import TurnsOptions
from specrouter.bench.output_file import write_outputs
from specrouter.bench.prompts import BUILT_IN
from specrouter.bench.sample import MeasurementError
from specrouter.bench.tables import model_sizes
from specrouter.config import RouterConfig
from specrouter.progress import Progress, ShownLoad
from specrouter.request.params import SamplingParams
from specrouter.router import ChainRouter

WARM, COLD = "cached", "read whole"


@dataclass(frozen=True)
class Turn:
    """A turn, asked twice: milliseconds to the first token, by way."""

    number: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: Mapping[str, float]


def bench_turns(options: TurnsOptions, progress: Progress) -> dict[str, Any]:
    """Raises `MeasurementError` where a request fails, `ConfigError` for what does not fit."""
    config = _config(options)
    progress.note(f"loading {config.pool.target}")
    with ChainRouter.from_config(config, ShownLoad(progress)) as router:
        if router.limits.max_tokens < options.longest:
            most = router.limits.max_tokens
            reason = f"turns of {options.longest} tokens do not fit the models' {most}"
            raise ConfigError("--history", reason)
        turns: list[Turn] = []
        progress.expect((1 + options.chats) * options.turns)
        for chat in range(-1, options.chats):  # the first one warms up
            found = _chat(router, options, chat, progress)
            turns += found if chat >= 0 else []
        return {"conditions": conditions(router), **_figures(options, turns)}


def write(document: Mapping[str, Any], options: TurnsOptions) -> None:
    """The table, and the file that is asked for. Raises `FileNotWrittenError`."""
    write_outputs(document, table(document), options.json)


def table(document: Mapping[str, Any]) -> str:
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


def _config(options: TurnsOptions) -> RouterConfig:
    config = RouterConfig.load(options.config)
    longest = max(config.engine.max_model_len or 0, options.longest)
    changes = {"max_model_len": longest, "max_requests": options.rows, "prefix_cache": True}
    engine = config.engine.model_copy(update=changes)
    config = config.model_copy(update={"engine": engine})
    return config.with_fresh_times() if options.fresh_times else config


def _chat(router: ChainRouter, options: TurnsOptions, chat: int, progress: Progress) -> list[Turn]:
    draws = np.random.default_rng([7, chat + 1])
    texts = itertools.chain.from_iterable(BUILT_IN.values())
    known = np.unique([token for text in texts for token in router.tokenizer(text)["input_ids"]])
    text = draws.choice(known, options.first).tolist()
    turns = []
    for number in range(1, options.turns + 1):
        progress.show(f"chat {chat + 1}/{options.chats}, turn {number}")
        turn, answer = _turn(router, options, text, (chat, number))
        progress.step()
        turns.append(turn)
        text = [*text, *answer, *draws.choice(known, options.said).tolist()]
    return turns


def _turn(
    router: ChainRouter, options: TurnsOptions, text: list[int], place: tuple[int, int]
) -> tuple[Turn, list[int]]:
    """The turn, and the answer that the conversation goes on with."""
    chat, number = place
    ways: dict[str, dict[str, Any]] = {
        WARM: {"cache_salt": f"chat {chat}"},
        COLD: {"prefix_cache": False},
    }
    ttft_ms, cached, answer = dict[str, float](), 0, list[int]()
    for way in sorted(ways, reverse=chat % 2 == 1):
        params = SamplingParams(
            max_new_tokens=options.new_tokens,
            temperature=options.temperature,
            seed=number,
            ignore_eos=True,
            **ways[way],
        )
        [output] = router.generate(text, params)
        if output.error is not None or output.metrics.ttft_ms is None:
            raise MeasurementError(f"a turn failed: {output.error}")
        ttft_ms[way] = output.metrics.ttft_ms
        if way == WARM:
            cached, answer = output.metrics.cached_tokens, output.token_ids
    return Turn(number, len(text), cached, ttft_ms), answer


def _figures(options: TurnsOptions, turns: list[Turn]) -> dict[str, Any]:
    """Medians by turn; `ratio` is that of the ratios within a turn."""
    rows = []
    for number in range(1, options.turns + 1):
        own = [turn for turn in turns if turn.number == number]
        rows.append(
            {
                "turn": number,
                "prompt_tokens": statistics.median(turn.prompt_tokens for turn in own),
                "cached_tokens": statistics.median(turn.cached_tokens for turn in own),
                "ttft_ms": {
                    way: statistics.median(turn.ttft_ms[way] for turn in own)
                    for way in (WARM, COLD)
                },
                "ratio": statistics.median(turn.ttft_ms[WARM] / turn.ttft_ms[COLD] for turn in own),
            }
        )
    return {"chats": options.chats, "new_tokens": options.new_tokens, "turns": rows}
