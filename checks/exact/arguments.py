"""The options that the checks share, and the router that they describe."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.exact.oracle import Oracle
from checks.exact.prompts import encode, load_prompts
from checks.exact.report import few_threads, prepare
from modelpool.attention.choice import BackendName
from modelpool.config import TEXT_SOURCES, Weights
from modelpool.fast.cpu import int8_refusal
from specrouter import ChainRouter, RouterConfig

MAX_MODEL_LEN = 1024
_SHARE = "one request of so many is served over paths, by the reference, which is slow"
_LONE_SHARE = "one request of so many is served alone, the next ones in the next arrangement"
WEIGHTS: tuple[Weights, ...] = ("auto", "int8") if int8_refusal() is None else ("auto",)
BUNDLED_CONFIG = Path(__file__).parents[2] / "configs" / "tiny.yaml"


@dataclass(frozen=True)
class Options:
    """`prompts` None means the prompts that are bundled with the tests. Of so many requests as
    `reference_share` one is served where models attend over paths, by a reference that is slow, of
    as many as `lone_share` where none stands beside another."""

    config: Path
    prompts: Path | None
    requests: int
    new_tokens: int
    dtypes: tuple[str, ...]
    reference_share: int = 8
    lone_share: int = 1
    weights: tuple[Weights, ...] = ("auto",)  # of the target


def make_parser(
    doc: str | None, *, requests: int = 48, new_tokens: int = 64, dtypes: tuple[str, ...] = ()
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=BUNDLED_CONFIG, help="of the router")
    parser.add_argument("--prompts", type=Path, help="folder of JSONL files with prompts")
    parser.add_argument("--requests", type=int, default=requests, help="at most, per arrangement")
    parser.add_argument("--new-tokens", type=int, default=new_tokens)
    parser.add_argument("--threads", type=int, default=few_threads())
    parser.add_argument("--reference-share", type=int, default=8, metavar="N", help=_SHARE)
    parser.add_argument("--lone-share", type=int, default=1, metavar="N", help=_LONE_SHARE)
    if dtypes:
        parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
        offered = sorted({*dtypes, "bfloat16"})
        parser.add_argument("--dtypes", nargs="+", choices=offered, default=list(dtypes))
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> Options:
    """Parses (the command line where `arguments` is None) and prepares the process."""
    given = parser.parse_args(arguments)
    prepare(given.threads)
    return Options(
        config=given.config,
        prompts=given.prompts,
        requests=given.requests,
        new_tokens=given.new_tokens,
        dtypes=tuple(getattr(given, "dtypes", ())),
        reference_share=given.reference_share,
        lone_share=given.lone_share,
        weights=tuple(getattr(given, "weights", ("auto",))),
    )


def open_router(
    config: Path | dict[str, Any],
    dtype: str,
    max_requests: int,
    weights: Weights = "auto",
    attention: BackendName = "sdpa",
) -> ChainRouter:
    """The configured router with every model in `dtype`, on the CPU, and the adaptive policy.

    `weights`: of the target.
    """
    settings = RouterConfig.load(config).model_dump()
    settings["scheduler"] = {"policy": "adaptive"}  # a check sets what else it wants
    settings["trees"] = {}
    settings["pool"]["attention"] = attention
    for model in settings["pool"]["models"]:
        if model["source"] not in TEXT_SOURCES:
            model.update(dtype=dtype, device="cpu")
        if model["name"] == settings["pool"]["target"]:
            model.update(weights=weights)
    settings["engine"].update(max_requests=max_requests, max_model_len=MAX_MODEL_LEN)
    return ChainRouter.from_config(settings)


def open_oracle(router: ChainRouter, dtype: str) -> Oracle:
    """The router's target, unpatched."""
    pool = router.pool
    return Oracle(
        pool.path(pool.target), dtype, vocab_size=pool.vocab_size, eos_token_ids=pool.eos_token_ids
    )


def load_token_prompts(router: ChainRouter, options: Options) -> list[tuple[int, ...]]:
    """Token ids of the prompts, cut so that prompt and output fit the models."""
    longest = min(MAX_MODEL_LEN, router.pool.max_positions(router.pool.target))
    prompts = load_prompts(options.prompts, options.requests)
    return encode(prompts, router.pool.tokenizer, longest - options.new_tokens)
