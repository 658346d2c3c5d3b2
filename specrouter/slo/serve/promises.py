"""Promises: the outcomes of requests that were admitted as attainable, and how far to trust them.

A prediction is a mean: of accepted tokens, of the prompts that are still to come, of a machine's
times. `error` is the share of recent predictions that did not come true. Admission departs from
first come, first served only while it is small; at first it does not.
"""

from dataclasses import dataclass

_REMEMBERED = 48.0  # promises, the last ones with most weight


@dataclass
class Promises:
    """The weights of recently `kept` and `broken` promises."""

    kept: float = 0.0
    broken: float = 0.0

    @property
    def error(self) -> float:
        """The share of broken promises, as if one more were broken; `NOT_BELIEVED` without any."""
        return (self.broken + 1.0) / (self.kept + self.broken + 1.0)

    def note(self, kept: bool) -> None:
        """Learn from the end of a request that was promised its objective."""
        fading = 1.0 - 1.0 / _REMEMBERED
        self.kept, self.broken = self.kept * fading + kept, self.broken * fading + (not kept)
