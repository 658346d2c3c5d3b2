"""Why the service cannot take a request that is good in itself, or cannot finish it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrouter.request.output import RequestOutput


class UnavailableError(RuntimeError):
    """The router takes no requests."""


class EngineDeadError(UnavailableError):
    """The engine has failed and takes no requests: make another router, or restart the process.

    Attributes:
        output: what the request had until then; None where it was never accepted.
    """

    def __init__(self, cause: str, output: "RequestOutput | None" = None) -> None:
        super().__init__(f"the engine has failed: {cause}")
        self.output = output

    @classmethod
    def check(cls, output: "RequestOutput | None") -> None:
        """Raises it for the output of a request whose engine has failed."""
        if output is not None and output.finish_reason == "engine_dead":
            raise cls(output.error or "", output)


class NoReplicaError(UnavailableError):
    """No replica takes requests now, but one will again."""

    retry_after_s = 1.0

    def __init__(self) -> None:
        super().__init__("no replica is ready")


class OverloadedError(UnavailableError):
    """As many requests wait as may wait. `retry_after_s`: when it may be worth a try."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests are waiting already")
        self.waiting = waiting
        self.retry_after_s = retry_after_s
