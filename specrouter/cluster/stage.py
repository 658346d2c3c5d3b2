"""Stage: a part of a sample's way, at one replica."""

from dataclasses import dataclass, replace

from specrouter.cluster.correction import Expected
from specrouter.cluster.state import RoutedRequest


@dataclass(frozen=True)
class Stage:
    """Attributes:
    why: it goes there, where that is not the ranking's reason.
    reads_only: up to its next token; then the other half of a pair goes on.
    kv: tickets of what that other half has read.
    """

    replica: str
    routed: RoutedRequest
    may_decline: bool
    why: str | None = None
    reads_only: bool = False
    kv: tuple[str, ...] = ()

    def comparable(self, expected: Expected) -> Expected:
        """Of that, what can be measured there: where nothing is read, no first token's time."""
        if not self.kv:
            return expected
        return replace(expected, told=replace(expected.told, first_ms=0.0))
