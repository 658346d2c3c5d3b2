"""`specrouter bench turns`: its arguments, and how its errors are told."""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path

from specrouter.cli.arguments import Commands, add_config
from specrouter.cli.bench import measured, options_from
from specrouter.cli.target import add_fresh_times


def add_bench_turns(what: Commands) -> None:
    parser = what.add_parser(
        "turns",
        help="the time to the first token in conversations, with the prefix cache and without",
        description="Every turn is asked twice, with what is cached and read whole, in alternating "
        "order. Prints a table of medians.",
    )
    add_config(parser, "bench-cpu.yaml", "the bundled pool with an inflated target")
    numbers = {
        "chats": (12, "conversations"),
        "turns": (5, "of each"),
        "history": (1500, "tokens that the last turn repeats"),
        "said": (48, "new tokens of a turn"),
        "new-tokens": (16, "of an answer"),
        "rows": (4, "requests of that length that KV memory is taken for"),
    }
    for name, (value, help_text) in numbers.items():
        parser.add_argument(
            f"--{name}", type=int, default=value, metavar="N",
            help=f"{help_text} (default: {value})",
        )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default: 0, which is greedy"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write all figures and the conditions; - prints them as the last line",
    )  # fmt: skip
    add_fresh_times(parser)
    parser.set_defaults(run=_bench_turns, log_level=logging.WARNING)


def _bench_turns(arguments: argparse.Namespace) -> int:
    from specrouter.bench.options import TurnsOptions
    from specrouter.bench.turns import bench_turns, write

    options = TurnsOptions(**options_from(TurnsOptions, arguments))
    return measured(partial(bench_turns, options), partial(write, options=options))
