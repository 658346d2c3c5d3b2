"""Failures of simulated replicas, and how long messages to them take.

Pure: a seed gives one list of failures.
"""

import random
from dataclasses import dataclass
from typing import Literal

FailureKind = Literal["killed", "hangs", "restarted"]


@dataclass(frozen=True)
class Failure:
    """What happens to a replica, and until when.

    `killed`: its process is gone, and a new one is there at `back_s`. `hangs`: it stands still
    until then, and goes on. `restarted`: it is emptied first, as `specrouter cluster restart` does.
    """

    replica: int
    at_s: float
    back_s: float
    kind: FailureKind = "killed"


@dataclass(frozen=True)
class Delays:
    """Seconds, measured on one machine with Ray Serve over gRPC.

    Attributes:
        message_s: of a state, an offer, an answer or tokens, one way (median).
        loss_s: until the streams of a killed replica are known to be lost (median of the kills in
            docs/cluster.md).
    """

    message_s: float = 0.0006
    loss_s: float = 0.07


NO_DELAYS = Delays(0.0, 0.0)


def drawn_failures(
    replicas: int, until_s: float, mean_up_s: float, down_s: float, seed: int
) -> tuple[Failure, ...]:
    """Of each replica, independent: exponential times of service, each followed by `down_s` of
    none; two of three are deaths, one is a hang. By time."""
    draws, found = random.Random(f"failures {seed}"), []
    for replica in range(replicas):
        at_s = draws.expovariate(1.0 / mean_up_s)
        while at_s < until_s:
            kind: FailureKind = draws.choice(("killed", "killed", "hangs"))
            found.append(Failure(replica, at_s, at_s + down_s, kind))
            at_s += down_s + draws.expovariate(1.0 / mean_up_s)
    return tuple(sorted(found, key=lambda one: (one.at_s, one.replica)))
