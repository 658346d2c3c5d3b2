"""The options that the checks share, and the router that they describe."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from checks.exact.oracle import Oracle
from checks.exact.prompts import encode, load_prompts
from checks.exact.report import few_threads, make_parser, prepare
from modelpool import ModelPool
from modelpool.config import TEXT_SOURCES, Weights
from modelpool.fast.panels import quantised_refusal
from specrouter import ChainRouter, RouterConfig

MAX_MODEL_LEN = 1024
_SHARE = "one request of so many is served over paths, by the reference, which is slow"
_LONE_SHARE = "one request of so many is served alone, the next ones in the next arrangement"
WEIGHTS: tuple[Weights, ...] = (
    ("auto", "int8", "int4") if quantised_refusal() is None else ("auto",)
)
BUNDLED_CONFIG = Path(__file__).parents[2] / "configs" / "tiny.yaml"


@dataclass(kw_only=True)
class Options:
    """`prompts` None means the prompts that are bundled with the tests. Of so many requests as
    `lone_share` one is served where none stands beside another. `weights`: of the target."""

    dtypes: Sequence[str]
    weights: Sequence[Weights]
    config: Path = BUNDLED_CONFIG
    prompts: Path | None = None
    requests: int = 48
    new_tokens: int = 64
    lone_share: int = 1
    threads: int = field(default_factory=few_threads)


def parse(doc: str | None, arguments: list[str] | None, dtypes: Sequence[str] = ()) -> Options:
    """Parses (the command line where `arguments` is None) and prepares the process."""
    parser = make_parser(doc)
    parser.add_argument("--config", type=Path, help="of the router")
    parser.add_argument("--prompts", type=Path, help="folder of JSONL files with prompts")
    parser.add_argument("--requests", type=int, help="at most, per arrangement")
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--reference-share", type=int, metavar="N", help=_SHARE)
    parser.add_argument("--lone-share", type=int, metavar="N", help=_LONE_SHARE)
    if dtypes:
        parser.add_argument("--weights", nargs="+", choices=WEIGHTS)
        parser.add_argument("--dtypes", nargs="+", choices=sorted({*dtypes, "bfloat16"}))
    asked = Options(dtypes=dtypes, weights=WEIGHTS[:2] if dtypes else ("auto",))
    options = parser.parse_args(arguments, asked)
    prepare(options.threads)
    return options


def bundled_config(*names: str) -> dict[str, Any]:
    """With these models alone."""
    config: dict[str, Any] = yaml.safe_load(BUNDLED_CONFIG.read_text(encoding="utf-8"))
    models = config["pool"]["models"]
    config["pool"]["models"] = [one for one in models if one["name"] in names]
    return config


def open_router(
    config: Path | dict[str, Any],
    dtype: str,
    max_requests: int,
    weights: Weights = "auto",
) -> ChainRouter:
    """The configured router with every model in `dtype`, on the CPU, and the adaptive policy.

    `weights`: of the target.
    """
    settings = RouterConfig.load(config).model_dump()
    settings["scheduler"] = {"policy": "adaptive"}  # a check sets what else it wants
    settings["trees"] = {}
    for model in settings["pool"]["models"]:
        if model["source"] not in TEXT_SOURCES:
            model.update(dtype=dtype, device="cpu")
        if model["name"] == settings["pool"]["target"]:
            model.update(weights=weights)
    settings["engine"].update(max_requests=max_requests, max_model_len=MAX_MODEL_LEN)
    return ChainRouter.from_config(settings)


def open_oracle(router: ChainRouter, dtype: str) -> Oracle:
    """The router's target, unpatched."""
    return oracle_of(router.pool, dtype)


def oracle_of(pool: ModelPool, dtype: str) -> Oracle:
    return Oracle(
        pool.path(pool.target), dtype, vocab_size=pool.vocab_size, eos_token_ids=pool.eos_token_ids
    )


def load_token_prompts(router: ChainRouter, options: Options) -> list[tuple[int, ...]]:
    """Token ids of the prompts, cut so that prompt and output fit the models."""
    longest = min(MAX_MODEL_LEN, router.pool.max_positions(router.pool.target))
    prompts = load_prompts(options.prompts, options.requests)
    return encode(prompts, router.pool.tokenizer, longest - options.new_tokens)
