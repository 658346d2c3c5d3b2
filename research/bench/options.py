"""What `python -m research chains`, `load` and `simulate` are asked for."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from modelpool.errors import ConfigError
from research.bench import tuning
from research.named_policies import LIVE
from specrouter.cli.arguments import default_config
from specrouter.cli.bench import (
    CONFIG,
    add_chains,
    add_count,
    add_json,
    add_seed,
    add_temperature,
    positive,
    whole,
)
from specrouter.cli.target import add_fresh_times
from specrouter.request.params import MAX_DEPTH, MAX_WIDTH

DEFAULT_POLICIES = ("target-only", "spec-4", "global-greedy", "goodput", "slo")
# What is not given: of the prompts' own texts, and of recorded ones.
_ORDINARY = {"new_tokens": 64, "temperature": 1.0, "by_category": False}
_RECORDED = {"new_tokens": 256, "temperature": 0.0, "by_category": True}


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, default=default_config(CONFIG), metavar="FILE",
        help="a YAML scenario, or the name of a bundled one, such as qwen2.5 (default: the bundled "
        "pool with an inflated target)",
    )  # fmt: skip
    add_fresh_times(parser)
    add_json(parser)


def add_lineup(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    add_chains(parser)
    parser.set_defaults(**dict.fromkeys(_ORDINARY))
    parser.add_argument(
        "--by-category", action="store_true", default=None,
        help="batches of one category each; ratios are means over categories",
    )  # fmt: skip
    parser.add_argument(
        "--workload", choices=["agent"],
        help="recorded outputs are replayed, part by part, greedy: code edits, tool-call echoes, "
        "JSON, turns; or those of --prompts, lines with prompt and output",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", metavar="NAME",
        help="transformers, assisted, assisted:DRAFTER, static, A>B>C, smallest, tuned, adaptive, "
        "or a chain policy of one's own (package.module:NAME); the target alone (off) always "
        "takes part",
    )  # fmt: skip
    for flag, default, most in (
        ("--depths", tuning.DEPTHS, MAX_DEPTH),
        ("--widths", tuning.WIDTHS, MAX_WIDTH),
    ):
        parser.add_argument(
            flag, type=whole(1, most), nargs="+", default=default, metavar="N",
            help="among which a static chain's best is found "
            f"(default: {' '.join(map(str, default))})",
        )  # fmt: skip
    parser.add_argument(
        "--peer", metavar="URL",
        help="a server with OpenAI's completions, as a contender; llama-server=URL: llama.cpp's, "
        "on exported weights, asked for the same work as the engine",
    )  # fmt: skip
    parser.add_argument("--api-key", metavar="KEY", help="of that server (default: OPENAI_API_KEY)")


def check_lineup(options: argparse.Namespace) -> None:
    """Complete the options. Raises `ConfigError` for those that do not go together."""
    for name, value in (_ORDINARY if options.workload is None else _RECORDED).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not tuning.grid(options.depths, options.widths):
        raise ConfigError("--widths", "no depth times width is small enough for a tree")
    if options.api_key is not None and options.peer is None:
        raise ConfigError("--api-key", "goes with --peer")
    if options.workload is not None and options.temperature > 0:
        # Shared noise would have drafters draw by chance what the target does not choose by it.
        raise ConfigError("--temperature", "must be 0: --workload agent is recorded text")
    if options.workload is not None and options.peer is not None:
        raise ConfigError("--peer", "cannot replay the recorded text of --workload agent")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Exactly one of `trace` and `poisson` is given.

    Every value of `scale` is a point of the sweep. `config`: None on a simulated machine.
    `fresh_times`: models are timed anew.
    """

    is_simulated: ClassVar[bool] = False
    known_policies: ClassVar[Collection[str]] = LIVE

    config: Path | None
    trace: Path | None = None
    poisson: float | None = None
    scale: tuple[float, ...] = (1.0,)
    requests: int = 200
    skip: int = 0
    e2e_ms: float | None = None
    ttft_slowdown: float | None = None
    trace_baseline_ms: float = 30.0
    output_tokens: int | None = None
    length_scale: float = 0.25
    prompts: tuple[Path, ...] = ()
    rounds: int = 1
    temperature: float = 1.0
    seed: int = 0  # rounds count up from it
    rows: int | None = None
    policy: tuple[str, ...] | None = None
    json: Path | None = None
    fresh_times: bool = False

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.poisson is None):
            raise ConfigError("--trace", "give either --trace or --poisson")
        if self.poisson is not None and self.skip:
            raise ConfigError("--skip", "goes with --trace")
        self._check_policies()

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the runs that take turns."""
        return self.policy or DEFAULT_POLICIES

    def _check_policies(self) -> None:
        for name in self.policy or ():
            if name not in self.known_policies:
                known = ", ".join(self.known_policies)
                raise ConfigError("--policy", f"{name!r} is none of {known}")
        if self.policy is not None and len(set(self.policy)) < len(self.policy):
            raise ConfigError("--policy", "names one twice")


def add_load(parser: argparse.ArgumentParser) -> None:
    """`LoadOptions`, all but the policies."""
    _add_common(parser)
    arrivals = parser.add_mutually_exclusive_group(required=True)
    arrivals.add_argument(
        "--trace", type=Path, metavar="FILE", help="a CSV file of AdaServe's or of Azure's format"
    )
    arrivals.add_argument(
        "--poisson", type=positive, metavar="RATE", help="requests per second, at random times"
    )
    parser.add_argument(
        "--scale", type=positive, nargs="+", default=LoadOptions.scale, metavar="X",
        help="times the gaps between requests: 2 halves the rate; several are a sweep (default: 1)",
    )  # fmt: skip
    add_count(parser, "--requests", LoadOptions.requests)
    add_count(parser, "--skip", LoadOptions.skip, "of the trace, from its start", least=0)
    parser.add_argument(
        "--e2e-ms", type=positive, metavar="MS",
        help="objective: time to the last token of every request, in addition to the trace's "
        "objectives",
    )  # fmt: skip
    parser.add_argument(
        "--ttft-slowdown", type=positive, metavar="F",
        help="objective: time to the first token of every request, as so many times that of a "
        "prompt of its length alone",
    )  # fmt: skip
    parser.add_argument(
        "--trace-baseline-ms", type=positive, default=LoadOptions.trace_baseline_ms, metavar="MS",
        help="baseline latency behind the trace's objectives in milliseconds (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--output-tokens", type=whole(2), metavar="N",  # one has no time per token
        help="of each request (default: the trace's, times the length scale)",
    )  # fmt: skip
    parser.add_argument(
        "--length-scale", type=positive, default=LoadOptions.length_scale, metavar="F",
        help="times the trace's lengths (default: 0.25)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=(), metavar="FILE",
        help="JSON lines; chosen by the trace's categories, cut or repeated to its lengths "
        "(default: a dozen built-in prompts)",
    )  # fmt: skip
    add_count(parser, "--rounds", LoadOptions.rounds)
    add_temperature(parser)
    add_seed(parser)
    parser.add_argument(
        "--rows", type=whole(), metavar="N", help="requests together (default: the config's)"
    )


def options_from(options: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of a dataclass's fields."""
    names = {field.name for field in dataclasses.fields(options)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    given["fresh_times"] = bool(given["fresh_times"])
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return {**given, **lists}
