"""`specrouter check`: prints the report of `specrouter.cli.check`."""

from __future__ import annotations

import argparse
import json
import logging

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


def _check(arguments: argparse.Namespace) -> int:
    # Imports the models' own code, which other commands do when they load them.
    from modelpool.errors import ConfigError
    from modelpool.fast.memory_speed import read_bytes_per_s
    from specrouter.cli.check import check_config
    from specrouter.progress import Progress, ShownLoad

    try:
        asked = read_asked(arguments)
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
