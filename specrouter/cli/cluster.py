"""`specrouter cluster status` and `restart`: the replicas of a service that runs."""

from __future__ import annotations

import argparse
import json
import logging
import os
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
    code, answer = _asked("GET", f"{arguments.url}/health")
    replicas: Mapping[str, str] = answer.get("replicas") or {}
    if "status" not in answer and "error" not in answer:
        return _failed(f"{arguments.url} is no SpecRouter: it answers {code}")
    print(answer.get("status", "stopped"))
    for name, doing in replicas.items():
        print(f"  {name}: {doing}")
    return 0 if code == 200 else _FAILED


def _restart(arguments: argparse.Namespace) -> int:
    code, answer = _asked("POST", f"{arguments.url}/router/restart")
    if code != 200:
        message = (answer.get("error") or {}).get("message", f"it answers {code}")
        return _failed(f"{arguments.url}: {message}")
    print(f"the replicas are being restarted: specrouter cluster status --url {arguments.url}")
    return 0


def _asked(method: str, url: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an answer, whatever its status; 0 where there is none."""
    import urllib.error
    import urllib.request

    key = os.environ.get("SPECROUTER_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(url, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return answer.status, _object(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, _object(error.read())
    except (OSError, ValueError) as error:
        return 0, {"error": {"message": f"cannot be reached: {error}"}}


def _object(body: bytes) -> dict[str, Any]:
    """Empty where it is no JSON object."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _failed(message: str) -> int:
    complain(RuntimeError(message))
    return _FAILED
