"""`specrouter inflate`: makes a larger checkpoint from a small one."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from specrouter.cli.arguments import Commands


def add_inflate(commands: Commands) -> None:
    parser = commands.add_parser(
        "inflate", help="widen and deepen a small checkpoint without changing its function"
    )
    parser.add_argument("source_dir", type=Path, metavar="SOURCE_DIR")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument(
        "--parameters", type=int, default=200_000_000, metavar="N",
        help="of the copy, at least (default: 200000000)",
    )  # fmt: skip
    parser.set_defaults(run=_inflate, log_level=logging.WARNING)


def _inflate(arguments: argparse.Namespace) -> int:
    from modelpool.errors import ConfigError
    from modelpool.inflate.inflate import FAULTS, inflate_to
    from specrouter.progress import Progress

    source, out = arguments.source_dir, arguments.out_dir
    try:
        with Progress(f"inflating {source}"):
            shape = inflate_to(source, out, arguments.parameters)
    except ConfigError:
        raise
    except FAULTS as error:
        reason = f"cannot inflate {str(source)!r} to {str(out)!r}: {error}"
        raise ConfigError("inflate", reason) from error
    print(f"{out}: {shape.parameter_count / 1e6:.1f}M parameters")
    return 0
