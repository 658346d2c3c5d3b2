"""What `specrouter bench load` is asked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from modelpool.errors import ConfigError
from specrouter.bench.named_policies import POLICIES
from specrouter.bench.output_file import check_json

DEFAULT_POLICIES = ("target-only", "spec-4", "global-greedy", "adaserve", "goodput", "slo")


@dataclass(frozen=True)
class LoadOptions:
    """What the command line asks for; exactly one of `trace` and `poisson`.

    Attributes:
        config: None with a server, which has its own.
        poisson: requests per second.
        lengths: whose lengths and objectives Poisson arrivals have: AdaServe's mix, or the four
            datasets of SpecRouter's evaluation, without objectives.
        e2e_ms: end-to-end objective of every request, beside the arrivals' own; times `slo_scale`.
        ttft_slowdown: TTFT objective of every request, as times the TTFT of a prompt of its length
            alone; times `slo_scale`.
        scale: times the trace's gaps; every value is a point of the sweep, and so is every one of
            `urgent_share` (none: as the trace has it) and `slo_scale`.
        output_tokens: None takes the trace's, times `length_scale`.
        policy: None takes `DEFAULT_POLICIES`, or a server's own.
        rows: requests that run together; None takes the configuration's.
        server: address of a running service, instead of a router in this process.
        api_key: of that service; None takes the environment's.
        plot: of the run over time; sweeps go to files beside it.
        json: "-" is stdout.
        fresh_times: models are timed anew.
    """

    is_simulated: ClassVar[bool] = False  # then any policy may be asked for

    config: Path | None
    trace: Path | None = None
    poisson: float | None = None
    lengths: Literal["adaserve", "specrouter"] | None = None
    e2e_ms: float | None = None
    ttft_slowdown: float | None = None
    scale: tuple[float, ...] = (1.0,)
    requests: int = 200
    skip: int = 0
    output_tokens: int | None = None
    length_scale: float = 0.25
    policy: tuple[str, ...] | None = None
    urgent_share: tuple[float, ...] = ()
    slo_scale: tuple[float, ...] = (1.0,)
    trace_baseline_ms: float = 30.0
    prompts: tuple[Path, ...] = ()
    rounds: int = 1
    temperature: float = 1.0
    seed: int = 0
    rows: int | None = None
    server: str | None = None
    api_key: str | None = field(default=None, repr=False)
    plot: Path | None = None
    json: Path | None = None
    fresh_times: bool = False

    def __post_init__(self) -> None:
        self._check_trace()
        self._check_policies()
        _check_whole("--rounds", self.rounds)
        _check_whole("--seed", self.seed, 0, 2**63)  # rounds count up from it
        if self.output_tokens is not None:
            _check_whole("--output-tokens", self.output_tokens, 2)  # one has no time per token
        _check_positive("--length-scale", [self.length_scale])
        _check_positive("--slo-scale", self.slo_scale)
        if not (self.temperature == 0 or 0.01 <= self.temperature <= 100):
            raise ConfigError("--temperature", f"must be 0, or 0.01 to 100, not {self.temperature}")
        check_json(self.json)

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the runs that take turns."""
        return ("server",) if self.server is not None else self.policy or DEFAULT_POLICIES

    def _check_trace(self) -> None:
        if (self.trace is None) == (self.poisson is None):
            raise ConfigError("--trace", "give either --trace or --poisson")
        if self.poisson is not None:
            _check_positive("--poisson", [self.poisson])
            if self.skip:
                raise ConfigError("--skip", "goes with --trace")
        elif self.lengths is not None:
            raise ConfigError("--lengths", "goes with --poisson")
        if self.e2e_ms is not None:
            _check_positive("--e2e-ms", [self.e2e_ms])
        if self.ttft_slowdown is not None:
            _check_positive("--ttft-slowdown", [self.ttft_slowdown])
        _check_positive("--scale", self.scale)
        _check_whole("--requests", self.requests)
        _check_whole("--skip", self.skip, 0)
        _check_positive("--trace-baseline-ms", [self.trace_baseline_ms])
        for share in self.urgent_share:
            if not 0 <= share <= 1:
                raise ConfigError("--urgent-share", f"must be from 0 to 1, not {share}")

    def _check_policies(self) -> None:
        for name in self.policy or ():
            if name not in POLICIES:
                known = ", ".join(POLICIES)
                raise ConfigError("--policy", f"{name!r} is none of {known}")
            if not (POLICIES[name].is_live or self.is_simulated):
                raise ConfigError("--policy", f"{name!r} admits as no engine here does")
        if self.policy is not None and len(set(self.policy)) < len(self.policy):
            raise ConfigError("--policy", "names one twice")
        if self.rows is not None:
            _check_whole("--rows", self.rows)
        if self.server is None:
            if self.api_key is not None:
                raise ConfigError("--api-key", "goes with --server")
            return
        if not self.server.startswith(("http://", "https://")):
            raise ConfigError("--server", f"{self.server!r} is no http address")
        its_own = {"--config": self.config, "--policy": self.policy, "--rows": self.rows}
        for argument, value in its_own.items():
            if value is not None:
                raise ConfigError(argument, "is the server's own: not with --server")


def _check_whole(argument: str, value: int, least: int = 1, most: int | None = None) -> None:
    if value < least:
        raise ConfigError(argument, f"must be at least {least}, not {value}")
    if most is not None and value > most:
        raise ConfigError(argument, f"must be at most {most}, not {value}")


def _check_positive(argument: str, values: Sequence[float]) -> None:
    if not values:
        raise ConfigError(argument, "needs at least one value")
    for value in values:
        if not 0 < value < math.inf:  # NaN is not
            raise ConfigError(argument, f"must be above 0, not {value}")
