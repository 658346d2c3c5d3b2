"""FleetLimits: what a request may be, so that every replica can serve it, since it may have to move
to any of them."""

from specrouter.cluster.fleet import Fleet
from specrouter.cluster.state import ReplicaState


class FleetLimits:
    """By the last states of all replicas, those that are lost included."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    @property
    def max_request_tokens(self) -> int:
        return min(state.max_request_tokens for state in self._states())

    def can_ever_fit(self, tokens: int) -> bool:
        return tokens <= self.max_request_tokens

    def baseline_tpot_ms(self) -> float:
        """The fastest replica's: an objective relative to it means the same wherever it runs."""
        return min(state.baseline_tpot_ms for state in self._states())

    def _states(self) -> list[ReplicaState]:
        states = [member.state for member in self._fleet.members.values()]
        return [state for state in states if state is not None]
