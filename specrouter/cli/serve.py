"""`specrouter serve`: the HTTP service, until it is told to stop."""

from __future__ import annotations

import argparse
import logging

from specrouter.cli.arguments import Commands, add_config, complain
from specrouter.config import RouterConfig
from specrouter.logs import configure_logs

logger = logging.getLogger(__name__)

_ENGINE_FAILED = 3


def add_serve(commands: Commands) -> None:
    parser = commands.add_parser("serve", help="answer HTTP requests until Ctrl-C")
    add_config(parser)
    parser.add_argument("--host", help="address to listen on (default: the config's)")
    parser.add_argument(
        "--port", type=_port, help="port; 0 picks a free one (default: the config's)"
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), help="of the log (default: the config's)"
    )
    parser.set_defaults(run=_serve, log_level=None)  # its format is in the configuration


def _serve(arguments: argparse.Namespace) -> int:
    # A web framework takes long to import; `generate` must not wait for it.
    from specrouter.cli.check import network_warnings
    from specrouter.http.serve import EngineFailureError, serve

    config = RouterConfig.load(arguments.config)
    given = {key: getattr(arguments, key) for key in ("host", "port", "log_format")}
    override = {key: value for key, value in given.items() if value is not None}
    server = config.server.model_copy(update=override)
    configure_logs(logging.INFO, server.log_format)
    for warning in network_warnings(server):
        logger.warning(warning)
    try:
        serve(config.model_copy(update={"server": server}))
    except EngineFailureError as error:
        complain(error)
        return _ENGINE_FAILED
    return 0


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not between 0 and 65535")
    return port
