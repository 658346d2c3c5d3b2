"""OutputLengths: usual lengths of outputs by SLO class, learned from served requests.

Contract: the last `_KEPT` lengths of each class count alike. Classes are those of the
configuration, so there are few. Not thread-safe: the owner locks.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping

_KEPT = 256
_LEAST = 8  # lengths that a class needs before it is used


class OutputLengths:
    def __init__(self) -> None:
        self._seen: dict[str | None, deque[int]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def record(self, slo_class: str | None, tokens: int) -> None:
        """Add the length of a request that ended by itself."""
        self._seen[slo_class].append(tokens)

    def quantiles(self, share: float = 0.9) -> Mapping[str | None, float]:
        """Return, by class, the least length that this share of outputs does not exceed.

        Classes with too few lengths are left out.
        """
        assert 0.0 < share <= 1.0
        return {
            name: float(sorted(seen)[math.ceil(share * len(seen)) - 1])
            for name, seen in self._seen.items()
            if len(seen) >= _LEAST
        }
