"""`specrouter bench chains`, `load` and `turns`: their arguments, and the output of their results.

Contract: an output file that cannot be written is refused before the measurement. If writing fails
afterwards, the result is printed and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrouter.cli.arguments import Commands, complain
from specrouter.cli.target import add_target, read_asked
from specrouter.target import naming

if TYPE_CHECKING:
    from specrouter.config import RouterConfig
    from specrouter.progress import Progress

CONFIG = "bench-cpu"  # the bundled pool with an inflated target
_STDOUT = Path("-")
_PROMPTS = (
    "JSON lines with prompt, question, text or turns; each file is a category (default: a dozen "
    "built-in prompts)"
)


def add_bench(commands: Commands) -> None:
    parser = commands.add_parser("bench", help="measure speed")
    what = parser.add_subparsers(metavar="WHAT", required=True)
    chains = what.add_parser(
        "chains",
        help="tokens per second of each chain and policy, and over the target alone",
        description="Contenders take turns; figures are medians of ratios within a round. "
        "Prints a table.",
    )
    _add_common(chains)
    add_chains(chains)
    chains.add_argument(
        "--only", nargs="+", metavar="NAME",
        help="adaptive, static (all chains), A>B>C, or a chain policy of one's own "
        "(package.module:NAME); the target alone (off) always takes part",
    )  # fmt: skip
    load = what.add_parser(
        "load",
        help="which requests get their tokens in time, with speculation and without",
        description="Requests are sent at random times whatever the state of the service, the "
        "same ones with speculation and without, in turns. Prints a table.",
    )
    _add_load(load)
    turns = what.add_parser(
        "turns",
        help="the time to the first token in conversations, with the prefix cache and without",
        description="Every turn is asked twice, with what is cached and read whole, in alternating "
        "order. Prints a table of medians.",
    )
    _add_turns(turns)
    for each, run in ((chains, _bench_chains), (load, _bench_load), (turns, _bench_turns)):
        each.set_defaults(run=run, log_level=logging.WARNING)


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all benchmarks."""
    add_target(parser, CONFIG)
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=_writable, metavar="FILE",
        help="write all figures and the conditions; - prints them as the last line",
    )  # fmt: skip


def add_chains(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench chains`, except contenders and models."""
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE", help=_PROMPTS
    )
    parser.add_argument(
        "--batch", type=whole(), nargs="+", metavar="B",
        help="requests together (default: 1 4 8 16, up to the config's engine.max_requests)",
    )  # fmt: skip
    add_count(parser, "--rounds", 5)
    add_count(parser, "--new-tokens", 64, "of each output")
    add_temperature(parser)


def _add_load(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument(
        "--poisson", type=positive, required=True, metavar="RATE",
        help="requests per second, at random times",
    )  # fmt: skip
    add_count(parser, "--requests", 200)
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE", help=_PROMPTS
    )
    parser.add_argument(
        "--input-tokens", type=whole(), metavar="N",
        help="of each prompt, cut or repeated to it (default: the prompts' own)",
    )  # fmt: skip
    add_count(parser, "--output-tokens", 64, "of each request", least=2)  # one token has no TPOT
    for name, which in (
        ("--tpot-ms", "mean time of a token after the first"),
        ("--ttft-ms", "time to the first token"),
        ("--e2e-ms", "time to the last token"),
    ):
        parser.add_argument(name, type=positive, metavar="MS", help=f"objective: {which}")
    add_count(parser, "--rounds", 1, "of the same requests, with speculation and without")
    add_temperature(parser)
    add_seed(parser)
    parser.add_argument(
        "--server", metavar="URL",
        help="a running specrouter server, under its own configuration, instead of a router here; "
        "it is sent the key in SPECROUTER_API_KEY",
    )  # fmt: skip


def _add_turns(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    add_count(parser, "--chats", 12, "conversations")
    add_count(parser, "--turns", 5, "of each", least=2)
    add_count(parser, "--history", 1500, "tokens that the last turn repeats")
    add_count(parser, "--said", 48, "new tokens of a turn, before its answer")
    add_count(parser, "--new-tokens", 16, "of an answer")


def add_count(
    parser: argparse.ArgumentParser, flag: str, default: int, text: str = "", least: int = 1
) -> None:
    help_ = f"{text} (default: {default})".lstrip()
    parser.add_argument(flag, type=whole(least), default=default, metavar="N", help=help_)


def add_temperature(parser: argparse.ArgumentParser) -> None:
    help_ = "0 is greedy (default: 1)"
    parser.add_argument("--temperature", type=_temperature, default=1.0, metavar="T", help=help_)


def add_seed(parser: argparse.ArgumentParser) -> None:
    """Add `--seed`; rounds count up from it."""
    help_ = "default: 0"
    parser.add_argument("--seed", type=whole(0, 2**63), default=0, metavar="S", help=help_)


def whole(least: int = 1, most: float = math.inf) -> Callable[[str], int]:
    """Return a type for argparse: a whole number from `least` to `most`."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, not {text}")
        return value

    return number


def positive(text: str) -> float:
    value = float(text)
    if not 0.0 < value < math.inf:  # false for NaN
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def _temperature(text: str) -> float:
    from specrouter.request.params import LEAST_TEMPERATURE

    value = float(text)
    if value != 0.0 and not LEAST_TEMPERATURE <= value <= 100.0:
        reason = f"must be 0, or from {LEAST_TEMPERATURE:g} to 100, not {text}"
        raise argparse.ArgumentTypeError(reason)
    return value


def _writable(text: str) -> Path:
    path = Path(text)
    if path == _STDOUT:
        return path
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


@contextmanager
def _asked(arguments: argparse.Namespace) -> Iterator[RouterConfig]:
    """Yield the configuration, checked as far as possible before PyTorch is imported.

    Raises `ConfigError`.
    """
    from specrouter.bench.prompts import load_prompts

    asked = read_asked(arguments, CONFIG)
    asked.check_sources()
    load_prompts(getattr(arguments, "prompts", ()))
    arguments.config = arguments.target or arguments.config or CONFIG
    with naming(asked.arguments):
        yield asked.config


def _check_only(names: Sequence[str], config: RouterConfig) -> None:
    """Raise `ConfigError` for a chain or a policy that cannot be, before the pool is opened."""
    from modelpool.errors import ConfigError
    from specrouter.config.policies import CHAIN_POLICIES

    target = config.pool.target
    models = [*(one.name for one in config.pool.models if one.name != target), target]
    for name in names:
        chain = name.split(">")
        try:
            if len(chain) == 1 and name != "off":
                CHAIN_POLICIES.check(name)
            elif len(chain) > 1 and not (
                chain[-1] == models[-1]
                and set(chain) <= set(models)
                and len(set(chain)) == len(chain)
            ):
                raise ConfigError("", f"no chain to {models[-1]} of {', '.join(models[:-1])}")
        except ConfigError as error:
            raise ConfigError("--only", f"{name!r}: {error.reason}") from error


def _bench_chains(arguments: argparse.Namespace) -> int:
    with _asked(arguments) as config:
        _check_only(arguments.only or (), config)
        from specrouter.bench.chains import bench_chains, chains_table

        return measured(partial(bench_chains, arguments, config), chains_table, arguments.json)


def _bench_load(arguments: argparse.Namespace) -> int:
    with _asked(arguments) if arguments.server is None else nullcontext() as config:
        from specrouter.bench.load import bench_load, load_table

        return measured(partial(bench_load, arguments, config), load_table, arguments.json)


def _bench_turns(arguments: argparse.Namespace) -> int:
    with _asked(arguments) as config:
        from specrouter.bench.turns import bench_turns, turns_table

        return measured(partial(bench_turns, arguments, config), turns_table, arguments.json)


def measured(
    measure: Callable[[Progress], Mapping[str, Any]],
    table: Callable[[Mapping[str, Any]], str],
    path: Path | None,
) -> int:
    """Measure with a display of the progress, print the table, and return the exit code.

    Args:
        measure: makes the JSON document.
        table: formats it.
        path: file for the JSON document; `-`: the last line of stdout.
    """
    from specrouter.bench.contenders import MeasurementError
    from specrouter.progress import Progress

    try:
        with Progress() as progress:
            document = measure(progress)
    except MeasurementError as error:
        complain(f"the measurement failed: {error}")
        return 1
    try:
        print(table(document), flush=True)
    finally:  # also if stdout was closed early
        is_written = path is None or _write(json.dumps(document), path)
    return 0 if is_written else 1


def _write(line: str, path: Path) -> bool:
    """Write the line to the file and return True; if that fails, print it and return False."""
    if path == _STDOUT:
        print(line, flush=True)
        return True
    try:
        path.write_text(f"{line}\n", encoding="utf-8")
    except OSError as error:
        print(line, flush=True)  # the measurement may have taken hours
        complain(f"cannot write {path}: {error.strerror or error}")
        return False
    print(f"wrote {path}", file=sys.stderr)
    return True
