"""`specrouter bench chains`: speed of a pool's chains, and of the policies that choose among them.

In every round the target alone, every static chain and the policies run one after the other, on the
same prompts and seeds. The machine should be idle otherwise.

Contract: a bad argument raises `ConfigError` before anything is loaded.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from modelpool import ModelPool
from modelpool.errors import ConfigError
from specrouter.bench import figures
from specrouter.bench.conditions import conditions, model_sizes, number, percent, request_limit
from specrouter.bench.contenders import Contender, OwnContender, measure
from specrouter.bench.prompts import deal, load_prompts, tokenize
from specrouter.config import RouterConfig
from specrouter.config.policies import CHAIN_POLICIES
from specrouter.progress import Progress, ShownLoad
from specrouter.request.params import Chain
from specrouter.router import ChainRouter
from specrouter.routing.scheduler import candidate_chains

_DEFAULT_BATCHES = (1, 4, 8, 16)
_ALL_CHAINS_UP_TO = 5  # models; in a larger pool, chains have at most three
_ADAPTIVE, STATIC = "adaptive", "static"
_HEAD = (
    f"{'':44}{'tokens/s':>9}{'req/s':>7}{'over off':>10}{'quartiles':>14}{'TPOT ms':>9}"
    f"{'accepted':>10}{'distinct':>10}{'control':>9}"
)


def bench_chains(
    options: argparse.Namespace, config: RouterConfig, progress: Progress
) -> dict[str, Any]:
    """Measure, and return the JSON document. Raises `ConfigError`, `MeasurementError`."""
    sizes = batch_sizes(options.batch, config.engine.max_requests)
    loading = ShownLoad(progress)
    pool = ModelPool.from_config(config.pool, progress=loading)  # reads no weights
    chains, policies = chosen(pool, options.only)
    texts, limit = load_prompts(options.prompts), request_limit(config, pool)
    if limit <= options.new_tokens:
        raise ConfigError("--new-tokens", f"must be below the model's length of {limit}")
    prompts = tokenize(texts, pool.tokenizer, limit - options.new_tokens)
    progress.note(f"loading {pool.target}")
    with ChainRouter.from_config(config, loading) as router:
        contenders: list[Contender] = [
            OwnContender("off", router, speculation="off"),
            *(OwnContender(chain_name(c), router, STATIC, {"chain": c}) for c in chains),
            *(OwnContender(policy, router, policy) for policy in policies),
        ]
        batches = {}
        for at, batch in enumerate(sizes, 1):
            dealt = partial(
                deal, prompts, batch=batch, new_tokens=options.new_tokens,
                temperature=options.temperature,
            )  # fmt: skip
            label = f"batch {batch} ({at} of {len(sizes)})"
            samples = measure(contenders, dealt, options.rounds, label, progress)
            categories = [work.category for work in dealt(0)]
            rows = {name: figures.row(samples, name, ["off"], categories) for name in samples}
            batches[str(batch)] = {"contenders": rows}
        return {"conditions": {**conditions(router), **asked(options, prompts)}, "batches": batches}


def batch_sizes(asked: Sequence[int] | None, max_requests: int) -> Sequence[int]:
    """Return the batch sizes to measure. Raises `ConfigError` for one above `max_requests`."""
    for batch in asked or ():
        if batch > max_requests:
            reason = f"{batch} is above engine.max_requests, which is {max_requests}"
            raise ConfigError("--batch", reason)
    return asked or [batch for batch in _DEFAULT_BATCHES if batch <= max_requests]


def asked(options: argparse.Namespace, prompts: Mapping[str, Sequence[object]]) -> dict[str, Any]:
    """Return the options that a figure depends on."""
    return {
        "config": Path(options.config).name,
        "prompts": {category: len(found) for category, found in prompts.items()},
        "rounds": options.rounds,
        "new_tokens": options.new_tokens,
        "temperature": options.temperature,
    }


def chain_name(chain: Chain) -> str:
    return ">".join(chain)


def static_chains(pool: ModelPool) -> list[Chain]:
    """Return the chains with a drafter whose models fit a device together."""
    parameters = {name: pool.parameter_count(name) for name in pool.names}
    longest = None if len(pool.names) <= _ALL_CHAINS_UP_TO else 3
    chains = candidate_chains(pool.names, parameters, pool.target, longest)
    return [chain for chain in chains if len(chain) > 1 and pool.fit_together(chain)]


def chosen(pool: ModelPool, only: Sequence[str] | None) -> tuple[list[Chain], list[str]]:
    """Return the chains and the policies to measure besides the target alone.

    Raises `ConfigError` for a name that the pool does not have.
    """
    chains = static_chains(pool)
    known = ["off", _ADAPTIVE, *map(chain_name, chains), *[STATIC] * bool(chains)]
    wanted = known if only is None else list(dict.fromkeys(only))
    own = own_policies([name for name in wanted if name not in known], known)
    policies = [name for name in wanted if name == _ADAPTIVE or name in own]
    return [c for c in chains if {chain_name(c), STATIC} & set(wanted)], policies


def own_policies(names: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """Return `names`, each of which is a chain policy. Raises `ConfigError` for any other."""
    for name in names:
        try:
            if name == STATIC:  # here it means all chains, not the policy of that name
                raise ValueError("the pool has no chain with a drafter")
            CHAIN_POLICIES.find(name)
        except ValueError as error:
            reason = f"{name!r} is none of {', '.join(known)}: {error}"
            raise ConfigError("--only", reason) from error
    return names


def chains_table(document: Mapping[str, Any]) -> str:
    """Return one block per batch size, each followed by its figures by category."""
    lines = [model_sizes(document["conditions"])]
    for batch, result in document["batches"].items():
        rows = result["contenders"]
        lines += ["", f"batch {batch}", *chain_rows(rows), *category_rows(rows)]
    return "\n".join(lines)


def chain_rows(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield _HEAD
    for name, row in rows.items():
        off, tpot = row["over"]["off"], row["tpot_ms"]
        quartiles = f"{off['low']:.2f}-{off['high']:.2f}"
        yield (
            f"{name:44}{row['tokens_per_s']['median']:9.1f}{row['requests_per_s']['median']:7.2f}"
            f"{off['median']:10.2f}{quartiles:>14}{number(tpot and tpot['median']):>9}"
            f"{number(row['acceptance_length']):>10}{percent(row['distinct_4grams']):>10}"
            f"{percent(row.get('control_share')):>9}"
        )


def category_rows(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    categories = next(iter(rows.values()))["over_by_category"]
    if len(categories) < 2:
        return
    names = "".join(f"{name:>14.13}" for name in categories)
    yield f"{'tokens/s, by category':44}" + names
    for name, row in rows.items():
        by = row["tokens_per_s_by_category"]
        yield f"{name:44}" + "".join(f"{by[one]['median']:14.1f}" for one in categories)
    yield f"{'over off, by category':44}" + names
    for name, row in rows.items():
        over = row["over_by_category"]
        yield f"{name:44}" + "".join(f"{over[one]['off']['median']:14.2f}" for one in categories)
