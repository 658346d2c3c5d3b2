"""`python -m research COMMAND`: the laboratory's commands. `--help` lists them."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from specrouter.cli.arguments import Commands, Parser, default_config
from specrouter.cli.bench import add_load_arguments, measured, options_from
from specrouter.cli.main import run
from specrouter.cli.serve import add_serve, serve_asked


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = Parser(prog="python -m research", description="Policies and figures of the papers.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_figures(commands)
    _add_simulate(commands)
    _add_serve(commands)
    return run(parser, argv)


def _add_figures(commands: Commands) -> None:
    parser = commands.add_parser(
        "figures",
        help="draw figures of the papers again, from the simulator",
        description="Runs named policies on simulated machines whose times were published, and "
        "writes a picture and a JSON file of each figure. Stopped, it goes on where it was.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME",
        help="adaserve-8-9, adaserve-10, adaserve-11, adaserve-12, adaserve-13-14, adaserve-15, "
        "adaserve-16, adaserve-grid, slos-serve-3, slos-serve-capacity, slos-serve-burst, "
        "slos-serve-replicas, specrouter-table-2, cluster-scale, cluster-equal, cluster-unequal, "
        "cluster-herd, cluster-failures, cluster-overload, streamserve-table-8 (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("figures"), metavar="DIR",
        help="of pictures, JSON and finished cells (default: figures)",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="few cells of few requests, to see that it works"
    )
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument(
        "--requests", type=int, default=400, metavar="N", help="of each cell (default: 400)"
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--traces", type=Path, metavar="DIR",
        help="folder of AdaServe's and Azure's traces (default: arrivals are drawn)",
    )  # fmt: skip
    parser.add_argument(
        "--where", nargs="+", default=[], metavar="FIELD=VALUE",
        help="only such cells, as in policy=vllm,slo rate=4.4 machine=adaserve-llama70b",
    )  # fmt: skip
    parser.set_defaults(run=_figures, log_level=logging.WARNING)


def _figures(arguments: argparse.Namespace) -> int:
    from research.figures.command import FigureOptions, draw_figures

    draw_figures(
        FigureOptions(**{one.name: getattr(arguments, one.name) for one in fields(FigureOptions)})
    )
    return 0


def _add_simulate(commands: Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="`specrouter bench load` in simulated time",
        description="Policies take turns on the same requests, on a machine whose cycles take what "
        "measured or published curves say.",
    )
    parser.add_argument(
        "--machine", type=Path, metavar="FILE",
        help="a file like research/machines/adaserve-llama70b.yaml (default: a pool's measured "
        "times)",
    )  # fmt: skip
    parser.add_argument(
        "--acceptance", type=float, default=0.75, metavar="A",
        help="share of a drafter's best tokens that are accepted (default: 0.75)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", nargs="+", metavar="NAME",
        help="a named policy of research/policies/named.py, or one that `bench load` knows",
    )  # fmt: skip
    add_load_arguments(parser)
    parser.set_defaults(run=_simulate, log_level=logging.WARNING)


def _simulate(arguments: argparse.Namespace) -> int:
    from research.simulate import SimulateOptions, simulate
    from specrouter.bench.load import write_load

    if arguments.config is None and arguments.machine is None:
        arguments.config = default_config("bench-cpu.yaml")
    options = SimulateOptions(**options_from(SimulateOptions, arguments))
    return measured(partial(simulate, options), partial(write_load, options=options))


def _add_serve(commands: Commands) -> None:
    parser = add_serve(commands)
    parser.description = "`specrouter serve`, with published policies."
    parser.add_argument(
        "--policy", nargs="+", required=True, metavar="NAME",
        help="paper, adaserve, adaserve-slo-phase, equal-greedy, specinfer, slos-serve, "
        "specustream, specustream-fixed, flowguard-printed (with a cluster), or one that `bench "
        "load` knows; flowguard-printed goes together with another one",
    )  # fmt: skip
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from research.policies.named import settings_of

    # What is asked for by itself comes last, and counts.
    arguments.settings = [*settings_of(arguments.policy), *arguments.settings]
    return serve_asked(arguments)


if __name__ == "__main__":
    sys.exit(main())
