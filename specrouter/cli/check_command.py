"""`specrouter check` and `pairs`: print the results of `specrouter.cli.check`."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from specrouter.cli.arguments import Commands
from specrouter.cli.target import add_target, read_asked
from specrouter.target import naming

_DOES_NOT_FIT = 1


def add_check(commands: Commands) -> None:
    parser = commands.add_parser(
        "check",
        help="say whether a configuration is valid and its models fit; loads no weights, and "
        "downloads none but to make a member with inflate_to",
    )
    add_target(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_check, log_level=logging.ERROR)


def add_pairs(commands: Commands) -> None:
    parser = commands.add_parser(
        "pairs",
        help="list models on this machine that may draft for a target, and what --draft auto takes",
        description="Looks through the hub's local cache, what lies beside a target's folder or "
        "GGUF file, and folders that are given. Reads no weights and downloads nothing.",
    )
    parser.add_argument("target", metavar="TARGET", help="as serve has it, a model")
    parser.add_argument(
        "--folder", nargs="+", type=Path, default=[], metavar="DIR",
        help="checkpoints, or folders with checkpoints or GGUF files in them",
    )  # fmt: skip
    parser.set_defaults(run=_pairs, log_level=logging.ERROR)


def _check(arguments: argparse.Namespace) -> int:
    from modelpool.errors import ConfigError
    from specrouter.progress import Progress, ShownLoad

    try:
        asked = read_asked(arguments)
        asked.check_sources()
        # This imports the models' code; other commands do so when they load them.
        from modelpool.fast.memory_speed import read_bytes_per_s
        from specrouter.cli.check import check_config

        with naming(asked.arguments), Progress("checking the models") as progress:
            report = check_config(
                asked.config, read_speed=read_bytes_per_s, progress=ShownLoad(progress)
            )
    except ConfigError as error:
        if arguments.json:
            fault = {"field": error.field, "reason": error.reason}
            print(json.dumps({"status": "invalid", "error": fault}, indent=2))
        raise
    print(json.dumps(report.to_json(), indent=2) if arguments.json else report.to_text())
    return 0 if report.fits else _DOES_NOT_FIT


def _pairs(arguments: argparse.Namespace) -> int:
    from specrouter.target import checked_source

    source = checked_source(arguments.target, "TARGET", may_fetch=False)
    from modelpool.drafters import candidates, find_target
    from modelpool.fast.memory_speed import read_bytes_per_s
    from specrouter.cli.check import shown_pairs

    target = find_target(source, "TARGET")
    found = candidates(target, arguments.folder)
    print(shown_pairs(target, found, read_bytes_per_s()))
    return 0
