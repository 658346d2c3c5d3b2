"""Why the service cannot take a request that is good in itself."""


class UnavailableError(RuntimeError):
    """The router takes no requests: it is closed, or its engine has failed."""


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
