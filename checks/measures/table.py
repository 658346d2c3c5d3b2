"""The table of measures: each with its value before the redesign, now, and its goal."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

BEFORE_COMMIT = "1c73a43"
_WIDTH = 66


@dataclass(frozen=True)
class Measure:
    """Attributes:
    before: at commit `BEFORE_COMMIT`, by this same program; but files without a test were counted
            by hand, since `COVERED` names today's places.
    now: None if it was not measured this time.
    goal: the most that it should be.
    reason: why it stays above its goal, if that has been decided.
    details: what was counted.
    """

    name: str
    before: int
    now: int | None
    goal: int
    reason: str = ""
    details: Sequence[str] = field(default=(), repr=False)

    @property
    def verdict(self) -> str:
        if self.now is None:
            return "not measured"
        return "reached" if self.now <= self.goal else "above"

    def to_json(self) -> dict[str, Any]:
        fields = {"name": self.name, "before": self.before, "now": self.now, "goal": self.goal}
        return {**fields, "verdict": self.verdict, "reason": self.reason}


def lines_of(measures: Sequence[Measure]) -> list[str]:
    """A table; the reasons stand below it."""
    header = f"{'':<{_WIDTH}}{BEFORE_COMMIT:>8}{'now':>8}{'goal':>8}  verdict"
    rows = [
        f"{one.name:<{_WIDTH}}{one.before:>8}{_shown(one.now):>8}{one.goal:>8}  {one.verdict}"
        for one in measures
    ]
    reasons = [f"  {one.name}: {one.reason}" for one in measures if one.reason]
    return [header, *rows, *(["", "Why some stay above:", *reasons] if reasons else [])]


def _shown(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
