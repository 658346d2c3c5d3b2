"""`python -m research COMMAND`: the laboratory's commands. `--help` lists them."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from research.bench.options import (
    DEFAULT_POLICIES,
    LoadOptions,
    add_lineup,
    add_load,
    check_lineup,
    options_from,
)
from research.named_policies import LIVE
from specrouter.cli.arguments import Commands, Parser, default_config
from specrouter.cli.bench import CONFIG, measured
from specrouter.cli.main import run
from specrouter.cli.serve import add_serve, serve_asked


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = Parser(prog="python -m research", description="Policies and figures of the papers.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_figures(commands)
    _add_chains(commands)
    _add_load(commands)
    _add_simulate(commands)
    _add_serve(commands)
    _add_export_gguf(commands)
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


def _add_chains(commands: Commands) -> None:
    parser = commands.add_parser(
        "chains",
        help="`specrouter bench chains` beside transformers and other servers, on recorded texts",
        description="Static chains are measured at their best depth and width.",
    )
    add_lineup(parser)
    parser.set_defaults(run=_chains, log_level=logging.WARNING)


def _chains(arguments: argparse.Namespace) -> int:
    # Imports all of transformers' generation, which no other command waits for.
    from research.bench.chains import bench_chains, table

    check_lineup(arguments)
    return measured(partial(bench_chains, arguments), table, arguments.json)


def _add_load(commands: Commands) -> None:
    parser = commands.add_parser(
        "load",
        help="named policies under load: arrivals of a trace, sweeps, objectives as ratios",
        description="Policies take turns on the same requests. Prints a table for each point of "
        "a sweep.",
    )
    add_load(parser)
    parser.add_argument(
        "--policy", nargs="+", metavar="NAME",
        help=f"{', '.join(LIVE)} (default: {' '.join(DEFAULT_POLICIES)})",
    )  # fmt: skip
    parser.set_defaults(run=_load, log_level=logging.WARNING)


def _load(arguments: argparse.Namespace) -> int:
    from research.bench.load import bench_load
    from research.bench.load_table import load_table

    options = LoadOptions(**options_from(LoadOptions, arguments))
    return measured(partial(bench_load, options), load_table, options.json)


def _add_simulate(commands: Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="`load` in simulated time",
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
        help="a named policy of research/named_policies.py",
    )  # fmt: skip
    add_load(parser)
    parser.set_defaults(config=None, run=_simulate, log_level=logging.WARNING)


def _simulate(arguments: argparse.Namespace) -> int:
    from research.bench.load_table import load_table
    from research.simulate import SimulateOptions, simulate

    if arguments.config is None and arguments.machine is None:
        arguments.config = default_config(f"{CONFIG}.yaml")
    options = SimulateOptions(**options_from(SimulateOptions, arguments))
    return measured(partial(simulate, options), load_table, options.json)


def _add_export_gguf(commands: Commands) -> None:
    parser = commands.add_parser(
        "export-gguf", help="write a Llama checkpoint as a GGUF file, for llama.cpp"
    )
    parser.add_argument("source_dir", type=Path, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: NAME-TYPE.gguf, in this folder"
    )
    parser.add_argument(
        "--type", choices=["bf16", "q8_0", "q4_0"], default="bf16",
        help="of matrices (default: bf16)",
    )  # fmt: skip
    parser.add_argument(
        "--pre", metavar="NAME",
        help="llama.cpp's name of how the tokenizer splits text, where it is not known here",
    )  # fmt: skip
    parser.set_defaults(run=_export_gguf, log_level=logging.WARNING)


def _export_gguf(arguments: argparse.Namespace) -> int:
    from modelpool.errors import ConfigError
    from modelpool.inflate.inflate import FAULTS
    from research.export_gguf.gguf_file import export_gguf
    from specrouter.progress import Progress

    source: Path = arguments.source_dir
    out = arguments.out or Path(f"{source.resolve().name}-{arguments.type}.gguf")
    failed = f"cannot write {str(source)!r} to {str(out)!r}"
    try:
        with Progress(f"writing {out}"):
            found = export_gguf(source, out, arguments.type, arguments.pre)
    except ConfigError:
        raise
    except FAULTS as error:
        raise ConfigError("export-gguf", f"{failed}: {error}") from error
    size = found.size_bytes / 1e6
    print(f"{found.path}: {found.tensors} tensors, {size:.1f} MB, pre-tokenizer {found.pre}")
    return 0


def _add_serve(commands: Commands) -> None:
    parser = add_serve(commands)
    parser.description = "`specrouter serve`, with published policies."
    parser.add_argument(
        "--policy", nargs="+", required=True, metavar="NAME",
        help="paper, adaserve, adaserve-slo-phase, equal-greedy, specinfer, slos-serve, "
        "specustream, specustream-fixed, flowguard-printed (with a cluster), or a baseline of "
        "research/named_policies.py; flowguard-printed goes together with another one",
    )  # fmt: skip
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from research.named_policies import settings_of

    # What is asked for by itself comes last, and counts.
    arguments.settings = [*settings_of(arguments.policy), *arguments.settings]
    return serve_asked(arguments)


if __name__ == "__main__":
    sys.exit(main())
