"""`specrouter bench load`: its arguments, and how its errors are told."""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path

from specrouter.cli.arguments import Commands, add_config, default_config
from specrouter.cli.bench import add_outputs, measured, options_from
from specrouter.cli.target import add_fresh_times


def add_bench_load(what: Commands) -> None:
    parser = what.add_parser(
        "load",
        help="which requests get their tokens in time, when they come as a trace says",
        description="Open-loop replay: requests are sent at their times whatever the state of the "
        "service; policies take turns on the same ones. Prints a table for each point of a sweep.",
    )
    add_load_arguments(parser)
    parser.add_argument(
        "--server", metavar="URL",
        help="a running specrouter server, under its own configuration, instead of a router here",
    )  # fmt: skip
    parser.add_argument(
        "--api-key", metavar="KEY", help="of that server (default: SPECROUTER_API_KEY)"
    )
    parser.set_defaults(run=_bench_load, log_level=logging.WARNING)


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Of a replay, whoever answers it."""
    add_config(parser, "bench-cpu.yaml", "the bundled pool with an inflated target")
    parser.set_defaults(config=None)  # to tell whether it is given
    _add_load_arrivals(parser)
    _add_load_objectives(parser)
    _add_load_lengths(parser)
    _add_load_runs(parser)
    add_outputs(parser, "a run over time; of a sweep also FILE-rate.png, -urgent.png, -slo.png")
    add_fresh_times(parser)


def _add_load_arrivals(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=Path, metavar="FILE", help="a CSV file of AdaServe's or of Azure's format"
    )
    source.add_argument(
        "--poisson", type=float, metavar="RATE", help="requests per second, at random times"
    )
    parser.add_argument(
        "--lengths", choices=("adaserve", "specrouter"),
        help="of Poisson arrivals: AdaServe's mix with its objectives (default), or the four "
        "datasets of SpecRouter's evaluation, without objectives",
    )  # fmt: skip
    parser.add_argument(
        "--scale", type=float, nargs="+", default=[1.0], metavar="X",
        help="times the gaps between requests: 2 halves the rate (default: 1); several are a sweep",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument(
        "--skip", type=int, default=0, metavar="K", help="of the trace, from its start (default: 0)"
    )
    parser.add_argument(
        "--urgent-share", type=float, nargs="+", default=[], metavar="SHARE",
        help="of the category with the tightest objective, redrawn (default: the trace's)",
    )  # fmt: skip


def _add_load_objectives(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--e2e-ms", type=float, metavar="MS",
        help="objective: time to the last token of every request, beside the trace's objectives",
    )  # fmt: skip
    parser.add_argument(
        "--ttft-slowdown", type=float, metavar="F",
        help="objective: time to the first token of every request, as so many times that of a "
        "prompt of its length alone",
    )  # fmt: skip
    parser.add_argument(
        "--slo-scale", type=float, nargs="+", default=[1.0], metavar="F",
        help="times all objectives (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--trace-baseline-ms", type=float, default=30.0, metavar="MS",
        help="baseline latency behind the trace's objectives in milliseconds (default: 30)",
    )  # fmt: skip


def _add_load_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output-tokens", type=int, metavar="N",
        help="of each request (default: the trace's, times the length scale)",
    )  # fmt: skip
    parser.add_argument(
        "--length-scale", type=float, default=0.25, metavar="F",
        help="times the trace's lengths (default: 0.25)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE",
        help="JSON lines; chosen by the trace's categories, cut or repeated to its lengths "
        "(default: a dozen built-in prompts)",
    )  # fmt: skip


def _add_load_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", nargs="+", metavar="P",
        help="target-only, spec-4, spec-6, spec-8, specinfer, equal-greedy, global-greedy, "
        "adaserve, adaserve-slo-phase, slos-serve, slo, goodput (default: target-only spec-4 "
        "global-greedy adaserve goodput slo)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="default: 1; 0 is greedy"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    parser.add_argument(
        "--rows", type=int, metavar="N", help="requests together (default: the config's)"
    )


def _bench_load(arguments: argparse.Namespace) -> int:
    from specrouter.bench.load import bench_load, write_load
    from specrouter.bench.options import LoadOptions

    if arguments.config is None and arguments.server is None:
        arguments.config = default_config("bench-cpu.yaml")
    options = LoadOptions(**options_from(LoadOptions, arguments))
    return measured(partial(bench_load, options), partial(write_load, options=options))
