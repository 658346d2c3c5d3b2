"""Errors of the service: a valid request that it cannot accept, or cannot finish."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrouter.request.output import RequestOutput


class UnavailableError(RuntimeError):
    """The router accepts no requests."""


class EngineDeadError(UnavailableError):
    """The engine has failed and accepts no requests: make another router, or restart the process.

    Attributes:
        output: output of the request until then; None if it was never accepted.
    """

    def __init__(self, cause: str, output: "RequestOutput | None" = None) -> None:
        super().__init__(f"the engine has failed: {cause}")
        self.output = output

    @classmethod
    def check(cls, output: "RequestOutput | None") -> None:
        """Raise the error for the output of a request whose engine has failed."""
        if output is not None and output.finish_reason == "engine_dead":
            raise cls(output.error or "", output)


class NoReplicaError(UnavailableError):
    """No replica accepts requests now, but one will again."""

    retry_after_s = 1.0

    def __init__(self) -> None:
        super().__init__("no replica is ready")


class OverloadedError(UnavailableError):
    """The queue is full. `retry_after_s`: time after which a retry may succeed."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests are waiting already")
        self.waiting = waiting
        self.retry_after_s = retry_after_s
