"""`python -m research chains`: `specrouter bench chains` with more contenders.

In every round, one after the other and on the same prompts and seeds: `transformers` `generate`
alone and assisted, own target-only, every static chain at its best depth and width, the policies,
and a server elsewhere. Nothing else should run meanwhile.

Contract: a bad argument raises `ConfigError` before anything is loaded.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import torch

from modelpool import ModelPool
from modelpool.errors import ConfigError
from research.bench.lineup import Lineup, lineup
from research.bench.llama_server import LLAMA_SERVER, LlamaServerContender
from research.bench.peer import PeerContender
from research.bench.recorded import (
    agent_workload,
    fingerprint,
    load_trajectories,
    tokenize_trajectories,
)
from research.bench.reference import Checkpoint, ReferenceContender, reference_process
from research.bench.session import Outside, Session
from specrouter.bench.chains import asked, batch_sizes, category_rows, chain_rows
from specrouter.bench.conditions import conditions, model_sizes, request_limit
from specrouter.bench.prompts import BenchPrompt, load_prompts, tokenize
from specrouter.config import RouterConfig
from specrouter.progress import Progress, ShownLoad
from specrouter.router import ChainRouter

_SMALL_ASSISTANT = 100_000_000  # parameters; up to here float32 suits a CPU better


def bench_chains(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Measures, and returns the JSON document. Raises `ConfigError`, `MeasurementError`."""
    config = RouterConfig.load(options.config)
    if options.fresh_times:
        config = config.with_fresh_times()
    sizes = batch_sizes(options.batch, config.engine.max_requests)
    loading = ShownLoad(progress)
    pool = ModelPool.from_config(config.pool, progress=loading)  # reads no weights
    who = lineup(pool, options.only, options.peer is not None, options.workload is not None)
    prompts, recorded = _workload(options, config, pool)
    with ExitStack() as stack:
        outside: list[Outside] = []
        if options.peer is not None:
            outside.append(_peer(options, pool, prompts, sizes))
        if who.has_transformers or who.assistants:
            process = stack.enter_context(reference_process(torch.get_num_threads()))
            outside += references(pool, who, process)
        progress.note(f"loading {pool.target}")
        router = stack.enter_context(ChainRouter.from_config(config, loading))
        session = Session(options, router, who, prompts, outside, progress)
        batches = {
            str(batch): session.run(batch, f"batch {batch} ({number} of {len(sizes)})")
            for number, batch in enumerate(sizes, 1)
        }
        told = {
            "workload": options.workload,
            "recorded": recorded,
            "by_category": options.by_category,
            **asked(options, prompts),
        }
        return {"conditions": {**conditions(router), **told}, "batches": batches}


def table(document: Mapping[str, Any]) -> str:
    """That of `specrouter bench chains`, with the speed over each base."""
    lines = [model_sizes(document["conditions"])]
    for batch, result in document["batches"].items():
        rows = result["contenders"]
        lines += ["", f"batch {batch}", *result["notes"], *_rows(rows), *category_rows(rows)]
    return "\n".join(lines)


def _rows(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    bases = [base for base in next(iter(rows.values()))["over"] if base != "off"]
    head, *lines = chain_rows(rows)
    yield head + "".join(f"{f'over {base}':>20}" for base in bases)
    for line, row in zip(lines, rows.values(), strict=True):
        yield line + "".join(f"{row['over'][base]['median']:20.2f}" for base in bases)


def _workload(
    options: argparse.Namespace, config: RouterConfig, pool: ModelPool
) -> tuple[Mapping[str, Sequence[BenchPrompt]], dict[str, Any] | None]:
    """Prompts by category; and of recorded outputs, what their figures are comparable by."""
    limit = request_limit(config, pool)
    if options.workload is None:
        texts = load_prompts(options.prompts)
        if limit <= options.new_tokens:
            raise ConfigError("--new-tokens", f"must be below the model's length of {limit}")
        return tokenize(texts, pool.tokenizer, limit - options.new_tokens), None
    found = load_trajectories(options.prompts) if options.prompts else agent_workload()
    prompts = tokenize_trajectories(found, pool.tokenizer, limit, options.new_tokens)
    return prompts, fingerprint(found)


def _peer(
    options: argparse.Namespace,
    pool: ModelPool,
    prompts: Mapping[str, Sequence[BenchPrompt]],
    sizes: Sequence[int],
) -> Outside:
    """Raises `ConfigError` for a server that does not answer, or is of no kind that is known."""
    given = options.peer or ""
    kind, separator, url = given.partition("=")
    if not separator or "://" in kind:  # an address may have a query
        return PeerContender(given, lambda text: pool.tokenizer(text)["input_ids"], options.api_key)
    if kind != LLAMA_SERVER:
        reason = f"{kind!r} is no kind of server: say URL, or {LLAMA_SERVER}=URL"
        raise ConfigError("--peer", reason)
    server = LlamaServerContender(url, options.api_key)
    flat = [prompt for found in prompts.values() for prompt in found]
    server.check(flat, sizes, options.new_tokens)
    return server


def references(pool: ModelPool, who: Lineup, process: Executor) -> list[Outside]:
    """`transformers` with each assistant, on the pool's checkpoints; alone it comes first."""
    target = _checkpoint(pool, pool.target)
    found: list[Outside] = []
    if who.has_transformers:
        found.append(ReferenceContender("transformers", process, target))
    for name in who.assistants:
        is_small = pool.parameter_count(name) <= _SMALL_ASSISTANT
        assistant = _checkpoint(pool, name, "float32" if is_small else None)
        found.append(ReferenceContender(f"assisted:{name}", process, target, assistant))
    return found


def _checkpoint(pool: ModelPool, name: str, dtype: str | None = None) -> Checkpoint:
    model = next(model for model in pool.config.models if model.name == name)
    return Checkpoint(
        str(pool.path(name)),
        dtype or pool.plan(name).dtype,
        pool.placement(name).device,
        model.trust_remote_code,
    )
