"""`specrouter bench load`: share of requests that attain objectives, with and without speculation.

The same requests arrive at the same random times in both cases, independent of the service's state.

Contract: a bad argument raises `ConfigError` before anything is loaded. Attainment is computed here
from the measured times, not taken from the service.
"""

import argparse
import itertools
import random
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from modelpool import ModelPool
from modelpool.errors import ConfigError
from specrouter.bench.conditions import (
    conditions,
    cpu_name,
    model_sizes,
    number,
    percent,
    request_limit,
)
from specrouter.bench.prompts import Texts, Tokenize, load_prompts
from specrouter.bench.replay import (
    LoadRequest,
    ReplayOutcome,
    ReplayService,
    figures,
    medians,
    replay,
)
from specrouter.bench.services import OwnService, ServerService
from specrouter.config import RouterConfig
from specrouter.http_client import API_KEY_VARIABLE, check_url, read_api_key
from specrouter.progress import Progress, ShownLoad
from specrouter.router import ChainRouter

_WAYS = ("off", "on")  # speculation
_OF_MODELS = {"target": "TARGET", "config": "--config", "draft": "--draft", "settings": "--set"}
_WARM_UP_REQUESTS = 10
_SEEDS_OF_A_ROUND = 100_000
_HEAD = (
    f"{'':16}{'attained':>9}{'violated':>9}{'goodput':>9}{'tokens/s':>9}{'req/s':>7}"
    f"{'TTFT ms p50/p95/p99':>21}{'TPOT ms p50/p95/p99':>21}{'e2e s p50/p95/p99':>21}"
    f"{'running':>9}{'accepted':>9}{'errors':>7}"
)


class WallClock:
    def now_s(self) -> float:
        return time.perf_counter()

    def sleep_s(self, duration_s: float) -> None:
        time.sleep(duration_s)


def bench_load(
    options: argparse.Namespace, config: RouterConfig | None, progress: Progress
) -> dict[str, Any]:
    """Measure, and return the JSON document. Raises `ConfigError`, `MeasurementError`.

    `config` is None if `options` name a `server`, which has its own.
    """
    texts = load_prompts(options.prompts)
    if config is None:
        check_url("--server", options.server)
        for name, spelled in _OF_MODELS.items():
            if getattr(options, name):
                raise ConfigError(spelled, "is the server's own: not with --server")
        server = ServerService(options.server, read_api_key(API_KEY_VARIABLE))
        requests = load_requests(options, texts, server.tokenize, server.max_request_tokens)
        measured = _measure(server, requests, options, progress)
        where = {"server": options.server, "target": server.model, "cpu": cpu_name()}
        return {"conditions": {**where, **_asked(options)}, "ways": measured}
    loading = ShownLoad(progress)
    pool = ModelPool.from_config(config.pool, progress=loading)  # reads no weights

    def tokenize(text: str) -> Sequence[int]:
        ids: Sequence[int] = pool.tokenizer(text)["input_ids"]
        return ids

    requests = load_requests(options, texts, tokenize, request_limit(config, pool))
    progress.note(f"loading {pool.target}")
    with ChainRouter.from_config(config, loading) as router:
        measured = _measure(OwnService(router), requests, options, progress)
        return {"conditions": {**conditions(router), **_asked(options)}, "ways": measured}


def load_requests(
    options: argparse.Namespace, texts: Texts, tokenize: Tokenize, limit: int
) -> list[LoadRequest]:
    """Return requests at random times, with prompts drawn from `texts`.

    The same options give the same requests.

    Args:
        options: the command's arguments.
        texts: prompts by category.
        tokenize: returns a text's ids.
        limit: most tokens of a request, prompt and output.

    Raises:
        ConfigError: a request is longer.
    """
    room = limit - options.output_tokens
    if room < max(1, options.input_tokens or 1):
        reason = f"does not fit the model's {limit} with prompts of {options.input_tokens or 1}"
        raise ConfigError("--output-tokens", reason)
    draw = random.Random(f"load {options.seed}")
    known = [(category, text) for category, found in texts.items() for text in found]
    at_s, requests = 0.0, []
    for index in range(options.requests):
        category, text = draw.choice(known)
        ids = tokenize(text)
        if options.input_tokens is not None:
            ids = list(itertools.islice(itertools.cycle(ids), options.input_tokens))
        requests.append(
            LoadRequest(
                at_s=at_s,
                category=category,
                token_ids=tuple(ids[-room:]),
                new_tokens=options.output_tokens,
                temperature=options.temperature,
                seed=options.seed + index,
                objective_ms=options.tpot_ms,
                ttft_ms=options.ttft_ms,
                e2e_ms=options.e2e_ms,
            )
        )
        at_s += draw.expovariate(options.poisson)
    return requests


def _measure(
    service: ReplayService,
    requests: Sequence[LoadRequest],
    options: argparse.Namespace,
    progress: Progress,
) -> dict[str, Any]:
    """Return medians over rounds of the figures with and without speculation, which take turns."""
    first = [replace(one, at_s=0.0) for one in requests[:_WARM_UP_REQUESTS]]
    for way in _WAYS[::-1]:
        progress.show(f"warm-up, speculation {way}")
        _run(service, first, way)
    progress.expect(options.rounds * len(_WAYS))
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    for turn in range(options.rounds):
        seeded = [replace(one, seed=one.seed + turn * _SEEDS_OF_A_ROUND) for one in requests]
        for way in _WAYS[:: 1 - 2 * (turn % 2)]:
            label = f"round {turn + 1}/{options.rounds}, speculation {way}"
            progress.show(label)
            outcomes = _run(service, seeded, way)
            progress.step()
            found[way].append(figures(outcomes))
            errors = [one.answer.error for one in outcomes if one.answer.error is not None]
            if errors:
                progress.note(f"{label}: the first of {len(errors)} errors: {errors[0]}")
    return {way: medians(rounds) for way, rounds in found.items()}


def _run(service: ReplayService, requests: Sequence[LoadRequest], way: str) -> list[ReplayOutcome]:
    """Replay the requests as a new tenant, because the same ones were answered before."""
    tenant = secrets.token_hex(8)
    speculation: Literal["off"] | None = "off" if way == "off" else None
    own = [replace(one, tenant=tenant, speculation=speculation) for one in requests]
    return replay(own, service, WallClock())


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "config": None if options.config is None else Path(options.config).name,
        "poisson_per_s": options.poisson,
        "requests": options.requests,
        "prompts": [file.name for file in options.prompts],
        "input_tokens": options.input_tokens,
        "output_tokens": options.output_tokens,
        "tpot_objective_ms": options.tpot_ms,
        "ttft_objective_ms": options.ttft_ms,
        "e2e_objective_ms": options.e2e_ms,
        "rounds": options.rounds,
        "temperature": options.temperature,
        "seed": options.seed,
    }


def load_table(document: Mapping[str, Any]) -> str:
    setting = document["conditions"]
    where = model_sizes(setting) if "models" in setting else setting["server"]
    rows = {f"speculation {way}": row for way, row in document["ways"].items()}
    return "\n".join([where, *load_rows(rows)])


def load_rows(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table, with one line of figures for each run by name."""
    yield _HEAD
    for name, row in rows.items():
        e2e_s = {p: None if ms is None else ms / 1000 for p, ms in row["e2e_ms"].items()}
        yield (
            f"{name:16}{percent(row['attainment']):>9}{row['violations']:>9g}"
            f"{row['goodput_tokens_per_s']:9.1f}{row['tokens_per_s']:9.1f}"
            f"{row['requests_per_s']:7.2f}{_percentiles(row['ttft_ms']):>21}"
            f"{_percentiles(row['tpot_ms']):>21}{_percentiles(e2e_s, 1):>21}"
            f"{row['mean_running']:9.1f}{number(row['acceptance_length']):>9}{row['errors']:>7g}"
        )


def _percentiles(values: Mapping[str, float | None], digits: int = 0) -> str:
    return "/".join("-" if value is None else f"{value:.{digits}f}" for value in values.values())
