"""`specrouter cluster status` and `restart`: the replicas of a running service."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from typing import Any

from specrouter.cli.arguments import Commands, complain

_FAILED = 1
_TIMEOUT_S = 10.0


def add_cluster(commands: Commands) -> None:
    cluster = commands.add_parser("cluster", help="show or restart the replicas of a service")
    what = cluster.add_subparsers(metavar="WHAT", required=True)
    status = what.add_parser("status", help="say what each replica is doing")
    restart = what.add_parser(
        "restart", help="restart the replicas one after the other; requests go on elsewhere"
    )
    for parser, run in ((status, _status), (restart, _restart)):
        parser.add_argument(
            "--url", default="http://127.0.0.1:8000", help="of the service (default: %(default)s)"
        )
        parser.set_defaults(run=run, log_level=logging.ERROR)


def _status(arguments: argparse.Namespace) -> int:
    code, answer = _asked(arguments.url, "/health", None)
    if "status" not in answer and _cause(answer) is None:
        return _failed(f"{arguments.url} is no SpecRouter: it answers {code}")
    status, cause = answer.get("status", "stopped"), _cause(answer)
    print(status if cause is None else f"{status}: {cause}")
    for name, doing in (answer.get("replicas") or {}).items():
        print(f"  {name}: {doing}")
    return 0 if code == 200 else _FAILED


def _restart(arguments: argparse.Namespace) -> int:
    code, answer = _asked(arguments.url, "/router/restart", {})
    if code != 200:
        return _failed(f"{arguments.url}: {_cause(answer) or f'it answers {code}'}")
    print(f"the replicas are being restarted: specrouter cluster status --url {arguments.url}")
    return 0


def _asked(url: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
    """Return status and JSON object of an answer with any status; 0 if there is no answer."""
    from urllib.error import HTTPError

    from specrouter.http_client import API_KEY_VARIABLE, FAILURES, Server, read_api_key

    server = Server(url.rstrip("/"), read_api_key(API_KEY_VARIABLE))
    try:
        with server.open(path, body, _TIMEOUT_S) as answer:
            code, text = answer.status, answer.read()
    except HTTPError as error:
        code, text = error.code, error.read()
    except FAILURES as error:
        return 0, {"error": {"message": f"cannot be reached: {error}"}}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return code, found if isinstance(found, dict) else {}


def _cause(answer: Mapping[str, Any]) -> str | None:
    """Return the message of the answer's error, if there is one."""
    error = answer.get("error")
    return error.get("message") if isinstance(error, dict) else None


def _failed(message: str) -> int:
    complain(message)
    return _FAILED
