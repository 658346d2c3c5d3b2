"""DecisionRecord: a switch of chain or trees, with its reason and its alternatives."""

from dataclasses import dataclass
from typing import Any

from specrouter.cycle import Option
from specrouter.view import ChainDecision


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """A switch: the new decision, its reason, and the predicted costs of the alternatives.

    Attributes:
        unix_s: time of the switch, in seconds since 1970.
        requests: number of requests that it is for.
        asked: depth and width that these requests ask for; None is left open.
        available: models that were not in quarantine.
    """

    cycle: int
    unix_s: float
    requests: int
    decision: ChainDecision
    asked: tuple[int | None, int | None] = (None, None)
    available: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        decision = self.decision
        return {
            "cycle": self.cycle,
            "unix_s": round(self.unix_s, 3),
            "requests": self.requests,
            "asked": dict(zip(("depth", "width"), self.asked, strict=True)),
            "available": list(self.available),
            "chain": list(decision.chain),
            "depth": decision.shape.depth,
            "width": decision.shape.width,
            "nodes": decision.shape.nodes or None,
            "reason": decision.reason,
            "predicted": _option_json(decision.predicted),
            "alternatives": [_option_json(option) for option in decision.alternatives],
        }


def _option_json(option: Option | None) -> dict[str, Any] | None:
    if option is None:
        return None
    return {
        "chain": list(option.chain),
        "depth": option.shape.depth,
        "width": option.shape.width,
        "nodes": option.shape.nodes,
        "cycle_ms": round(option.cycle_ms, 3),
        "tokens_per_cycle": round(option.tokens, 3),
        "ms_per_token": round(option.ms_per_token, 3),
    }
