"""The service as it is, for checks that must also hurt it and look inside.

    python -m checks.service.watched_service --config FILE --port 0

Two things differ from `specrouter serve`. When it closes with no request inside, all state is
checked, and the result printed. And from SIGUSR1 on, each forward of the drafter `FAILING` raises.
"""

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from modelpool.forward import ForwardOutput
from modelpool.packed_model import PackedModel
from specrouter import ChainRouter
from specrouter.config import RouterConfig
from specrouter.http.serve import serve
from specrouter.logs import configure_logs

FAILING = "tiny-1m"
WELL = "integrity: ok"


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.watched_service")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    configure_logs(logging.INFO, "text")
    install_faults()
    install_integrity()
    config = RouterConfig.load(arguments.config)
    server = config.server.model_copy(update={"port": arguments.port})
    serve(config.model_copy(update={"server": server}))
    return 0


def install_faults() -> None:
    fails = threading.Event()
    original = PackedModel.forward

    def forward(model: PackedModel, tokens: Tensor, *rest: Any) -> ForwardOutput:
        if model.name == FAILING and fails.is_set():
            raise RuntimeError("injected: this drafter has failed")
        return original(model, tokens, *rest)

    mock.patch.object(PackedModel, "forward", forward).start()
    signal.signal(signal.SIGUSR1, lambda *_: fails.set())


def install_integrity() -> None:
    """Before the router closes, and once only."""
    original = ChainRouter.close
    checked = threading.Event()

    def close(router: ChainRouter) -> None:
        if not checked.is_set() and router.is_healthy:
            checked.set()
            _check(router)
        original(router)

    mock.patch.object(ChainRouter, "close", close).start()


def _check(router: ChainRouter) -> None:
    state = router.instruments.engine_state()
    if state.running or state.waiting:
        print(f"integrity: unknown, {state.running} run and {state.waiting} wait", flush=True)
        return
    try:
        router.instruments.check_integrity()
    except AssertionError as error:
        print(f"integrity: violated, {error}", flush=True)
    else:
        print(WELL, flush=True)


if __name__ == "__main__":
    sys.exit(main())
