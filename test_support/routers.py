"""What is asked of a router after its requests."""

import time

from specrouter import ChainRouter


def assert_whole(router: ChainRouter, patience_s: float = 60.0) -> None:
    """`check_integrity` of a router that is about to be idle.

    The engine's thread may still be freeing the row of the output that was just received.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return router.instruments.check_integrity()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
