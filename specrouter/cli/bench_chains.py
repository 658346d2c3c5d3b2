"""`specrouter bench chains`: its arguments, and how its errors are told."""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path

from specrouter.cli.arguments import Commands, add_config
from specrouter.cli.bench import add_outputs, measured, options_from
from specrouter.cli.target import add_fresh_times


def add_bench_chains(what: Commands) -> None:
    parser = what.add_parser(
        "chains",
        help="each chain and policy against transformers and against the target alone",
        description="Contenders take turns; figures are medians of ratios within a round. "
        "Prints a table.",
    )
    add_config(parser, "bench-cpu.yaml", "the bundled pool with an inflated target")
    _add_bench_texts(parser)
    _add_bench_work(parser)
    _add_bench_contenders(parser)
    add_outputs(parser, "speed-ups by batch size")
    add_fresh_times(parser)
    parser.set_defaults(run=_bench_chains, log_level=logging.WARNING)


def _add_bench_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE",
        help="JSON lines with prompt, question, text or turns; each file is a category "
        "(default: a dozen built-in prompts)",
    )  # fmt: skip
    parser.add_argument(
        "--workload", choices=["agent"],
        help="recorded outputs are replayed, part by part, greedy: code edits, tool-call echoes, "
        "JSON, turns; or those of --prompts, lines with prompt and output",
    )  # fmt: skip


def _add_bench_work(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch", type=int, nargs="+", metavar="B",
        help="requests together (default: 1 4 8 16, up to the config's engine.max_requests)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--new-tokens", type=int, metavar="N",
        help="default: 64; at most 256 of a recorded output",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, metavar="T",
        help="default: 1; 0 is greedy, as recorded outputs are",
    )  # fmt: skip
    parser.add_argument(
        "--by-category", action="store_true",
        help="batches of one category each; ratios are means over categories",
    )  # fmt: skip
    parser.add_argument(
        "--min-distinct", type=float, default=0.5, metavar="SHARE",
        help="greedy texts with fewer distinct 4-grams are repetitive (default: 0.5)",
    )  # fmt: skip


def _add_bench_contenders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", nargs="+", metavar="NAME",
        help="transformers, assisted, assisted:DRAFTER, static, A>B>C, smallest, tuned, adaptive, "
        "or a chain policy of one's own (package.module:NAME); the target alone (off) always takes "
        "part",
    )  # fmt: skip
    for name, values in (("depths", [1, 2, 3, 4, 6]), ("widths", [1, 2, 3])):
        shown = " ".join(map(str, values))
        parser.add_argument(
            f"--{name}", type=int, nargs="+", default=values, metavar="N",
            help=f"among which a static chain's best is found (default: {shown})",
        )  # fmt: skip
    parser.add_argument(
        "--peer", metavar="URL",
        help="a server with OpenAI's completions, as a contender; llama-server=URL: llama.cpp's, "
        "on exported weights, asked for the same work as the engine",
    )  # fmt: skip
    parser.add_argument("--api-key", metavar="KEY", help="of that server (default: OPENAI_API_KEY)")


def _bench_chains(arguments: argparse.Namespace) -> int:
    # Imports all of transformers' generation, which no other command waits for.
    from specrouter.bench.chains import bench_chains, write
    from specrouter.bench.options import RECORDED_TOKENS, ChainsOptions

    is_recorded = arguments.workload is not None
    if arguments.new_tokens is None:
        arguments.new_tokens = RECORDED_TOKENS if is_recorded else 64
    if arguments.temperature is None:
        arguments.temperature = 0.0 if is_recorded else 1.0
    arguments.by_category |= is_recorded
    options = ChainsOptions(**options_from(ChainsOptions, arguments))
    return measured(partial(bench_chains, options), partial(write, options=options))
