"""`specrouter serve`: runs the HTTP service until it gets a signal to stop."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from typing import NoReturn

from specrouter.cli.arguments import Commands, Parser, complain
from specrouter.cli.target import add_target, read_asked
from specrouter.target import naming

logger = logging.getLogger(__name__)

_ENGINE_FAILED = 3


def add_serve(commands: Commands) -> Parser:
    parser = commands.add_parser(
        "serve",
        help="answer HTTP requests until Ctrl-C",
        description="Serves a model, drafted for by smaller ones, or a scenario with both. While "
        "it loads, the port answers 503 with the progress.",
    )
    add_target(parser)
    parser.add_argument(
        "--api-key", metavar="KEY",
        help="that clients must send; better in the environment, SPECROUTER_API_KEY, since other "
        "users of the machine can see arguments",
    )  # fmt: skip
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, help="port; 0 picks a free one (default: the config's, 8000)"
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), help="of the log (default: the config's, text)"
    )
    parser.set_defaults(run=serve_asked, log_level=None)  # the configuration has its format
    return parser


def serve_asked(arguments: argparse.Namespace) -> int:
    """Serve without garbage collection until the models are loaded; return the exit code.

    Loading makes half a million objects that stay. Collections would take a sixth of the start;
    `serve` enables them after it.
    """
    gc.disable()
    try:
        return _serve(arguments)
    finally:
        gc.enable()


def _serve(arguments: argparse.Namespace) -> int:
    from specrouter.http.keys import network_warnings
    from specrouter.http.serve import EngineFailureError, StoppedWhileLoadingError, serve
    from specrouter.logs import configure_logs

    asked = read_asked(arguments)
    asked.check_sources()
    configure_logs(logging.INFO, asked.config.server.log_format)
    for warning in network_warnings(asked.config.server):
        logger.warning(warning)
    try:
        with naming(asked.arguments):
            serve(asked.config)
    except EngineFailureError as error:
        complain(error)
        _leave(_ENGINE_FAILED)
    except StoppedWhileLoadingError:
        _leave(0)
    return 0


def _leave(code: int) -> NoReturn:
    """Exit at once: a thread still loads or hangs in a forward.

    Python would wait for it, or abort in the middle of PyTorch.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
