"""ClusterConfig: replicas of the pool in separate processes, and routing among them."""

from typing import Any

from pydantic import Field, model_validator

from modelpool.errors import ConfigError
from specrouter.config.policies import ReplicaPolicyName
from specrouter.config.strict import Strict

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"


class ReplicaConfig(Strict):
    """Replicas of one kind. All processes of a cluster serve the same pool and target.

    Attributes:
        name: name; with `count` above 1, `NAME-0`, `NAME-1`, ...
        count: number of replicas.
        threads: CPU threads of each replica.
        device: device of all its models, such as `cuda:1`; by default as in `pool`.
        engine: keys of `engine` that differ here, such as `max_requests`.
    """

    name: str = Field(pattern=_NAME)
    count: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    device: str | None = None
    engine: dict[str, Any] = Field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each replica."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(self.count))


class HalfConfig(Strict):
    """One process of a pair.

    Attributes:
        threads: CPU threads.
        device: device of all its models, such as `cuda:1`; by default as in `pool`.
        engine: keys of `engine` that differ here, such as `max_requests`.
    """

    threads: int = Field(default=1, ge=1)
    device: str | None = None
    engine: dict[str, Any] = Field(default_factory=dict)


class PairConfig(Strict):
    """A stream pair: one process reads prompts, the other decodes.

    Attributes:
        name: name of the pair; its processes are `NAME-prefill` and `NAME-decode`.
        prefill: reads prompts and generates the first token.
        decode: generates the rest.
    """

    name: str = Field(pattern=_NAME)
    prefill: HalfConfig = HalfConfig()
    decode: HalfConfig = HalfConfig()

    @property
    def halves(self) -> tuple[str, str]:
        """Names of the prefill and the decode half."""
        return f"{self.name}-prefill", f"{self.name}-decode"


class RoutingConfig(Strict):
    """The choice of a replica for each request.

    Attributes:
        policy: `slo`: a replica that can attain the objective, by its measured times; `flowguard`:
            StreamServe's score, of reports and requests sent since; `join-shortest`: fewest
            requests; `p2c`: the better of two random ones; `round-robin`: in turn.
        metrics_s: seconds between a replica's reports.
    """

    policy: ReplicaPolicyName = "slo"
    metrics_s: float = Field(default=0.5, ge=0.02, le=60, allow_inf_nan=False)


class ResumeConfig(Strict):
    """Limits for continuing a request on another replica, with the same text.

    Attributes:
        limit: replica failures that a request survives.
        silence_s: seconds without a report after which a replica counts as dead: it gets no
            requests, and its requests move.
    """

    limit: int = Field(default=3, ge=0)
    silence_s: float = Field(default=1.5, gt=0, allow_inf_nan=False)


class ClusterConfig(Strict):
    """Replicas on Ray Serve; needs the extra `cluster` (`pip install 'specrouter[cluster]'`).

    Attributes:
        address: `local` starts Ray on this machine, `auto` joins the Ray that runs here; else the
            address of a Ray to join.
        replicas: engines of one process.
        pairs: engines of two processes, for prompts and decoding. At least one replica or pair is
            required.
        routing: choice of a replica for each request.
        resume: limits for moving requests to other replicas.
    """

    address: str = "local"
    replicas: tuple[ReplicaConfig, ...] = ()
    pairs: tuple[PairConfig, ...] = ()
    routing: RoutingConfig = RoutingConfig()
    resume: ResumeConfig = ResumeConfig()

    @model_validator(mode="after")
    def _names_are_unique(self) -> "ClusterConfig":
        if not (self.replicas or self.pairs):
            raise ConfigError("replicas", "there must be one, or a pair (cluster.pairs)")
        taken = set[str]()
        for field, one in self.processes:
            for name in one.names:
                if name in taken:
                    raise ConfigError(field.partition("[")[0], f"{name!r} is the name of two")
                taken.add(name)
        for pair in self.pairs:
            if pair.name in taken:
                raise ConfigError("pairs", f"{pair.name!r} is the name of two")
            taken.add(pair.name)
        return self

    @model_validator(mode="after")
    def _states_come_in_time(self) -> "ClusterConfig":
        period_s = self.routing.metrics_s
        if self.resume.silence_s <= period_s:
            reason = (
                f"must be above cluster.routing.metrics_s, {period_s:g}: states come that often"
            )
            raise ConfigError("resume.silence_s", reason)
        return self

    @property
    def processes(self) -> list[tuple[str, ReplicaConfig]]:
        """Replicas and halves of pairs, each with its key in this section."""
        found = [(f"replicas[{number}]", one) for number, one in enumerate(self.replicas)]
        for number, pair in enumerate(self.pairs):
            for half, name in zip(("prefill", "decode"), pair.halves, strict=True):
                one = ReplicaConfig(name=name, **getattr(pair, half).model_dump())
                found.append((f"pairs[{number}].{half}", one))
        return found

    @property
    def threads(self) -> dict[str, int]:
        """CPU threads by name of the process."""
        return {name: one.threads for _, one in self.processes for name in one.names}
