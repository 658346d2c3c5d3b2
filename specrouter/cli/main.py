"""The command line: `specrouter serve`, `check`, `cluster`, `generate`, `bench` and others.

Contract: a bad argument or configuration ends with exit code 2 and one line on stderr that names
the field; a generation or a measurement that fails, and a pool that does not fit, with 1; a service
whose engine has failed, with 3. Only here is logging configured.
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

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    return run(_parser(), argv)


def run(parser: Parser, argv: Sequence[str] | None) -> int:
    """Runs the command that is asked for, and tells its errors; returns the exit code."""
    arguments = parser.parse_args(argv)
    # After the arguments: what follows may take seconds to import, their errors should not.
    from modelpool.errors import ConfigError
    from specrouter.request.params import RequestError
    from specrouter.target import naming

    try:
        if arguments.log_level is not None:
            configure_logs(arguments.log_level)
        with naming({"config": "--config"}):  # of commands that have no TARGET
            exit_code: int = arguments.run(arguments)
        return exit_code
    except (ConfigError, RequestError) as error:
        complain(error)
        return BAD_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader left (`| head`). Python flushes stdout once more at exit: let it go nowhere.
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
