"""`specrouter bench figures`: its arguments, and how its errors are told."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from specrouter.cli.arguments import Commands


def add_bench_figures(what: Commands) -> None:
    parser = what.add_parser(
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
    parser.set_defaults(run=_bench_figures, log_level=logging.WARNING)


def _bench_figures(arguments: argparse.Namespace) -> int:
    from specrouter.bench.redraw.command import FigureOptions, bench_figures

    bench_figures(
        FigureOptions(
            tuple(arguments.names),
            arguments.out,
            arguments.quick,
            arguments.seeds,
            arguments.requests,
            arguments.processes,
            arguments.traces,
            tuple(arguments.where),
        )
    )
    return 0
