"""The command line: `specrouter serve`, `check`, `cluster`, `generate`, `bench` and others.

Contract: a bad argument or configuration ends with exit code 2 and one line on stderr that names
the field; a generation or a measurement that fails, and a pool that does not fit, with 1; a service
whose engine has failed, with 3. Logging is configured only here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from specrouter.cli.arguments import BAD_INPUT, Parser, complain
from specrouter.cli.bench import add_bench
from specrouter.cli.chat import add_chat
from specrouter.cli.check_command import add_check, add_pairs
from specrouter.cli.cluster import add_cluster
from specrouter.cli.generate import add_generate
from specrouter.cli.inflate import add_inflate
from specrouter.cli.serve import add_serve
from specrouter.cli.verify import add_verify
from specrouter.logs import configure_logs
from specrouter.version import __version__

_INTERRUPTED = 130  # 128 + SIGINT, as in shells


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    return run(_parser(), argv)


def run(parser: Parser, argv: Sequence[str] | None) -> int:
    """Run the command in `argv`, print its errors, and return the exit code."""
    arguments = parser.parse_args(argv)
    # Imported after parsing: errors of the arguments should not wait for seconds of imports.
    from modelpool.errors import ConfigError
    from specrouter.request.params import RequestError
    from specrouter.target import naming

    try:
        if arguments.log_level is not None:
            configure_logs(arguments.log_level)
        with naming({"config": "--config"}):  # for commands without a TARGET
            exit_code: int = arguments.run(arguments)
        return exit_code
    except (ConfigError, RequestError) as error:
        complain(error)
        return BAD_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Python flushes stdout at exit, so redirect it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> Parser:
    parser = Parser(prog="specrouter", description="Routed speculative decoding.")
    parser.add_argument("--version", action="version", version=f"specrouter {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_serve(commands)
    add_check(commands)
    add_pairs(commands)
    add_cluster(commands)
    add_generate(commands)
    add_chat(commands)
    add_verify(commands)
    add_inflate(commands)
    add_bench(commands)
    return parser
