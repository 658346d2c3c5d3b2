"""What `specrouter bench chains`, `load` and `turns` are asked for.

Contract: options that make no sense raise a `ConfigError` that names the argument.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from modelpool.errors import ConfigError
from specrouter.bench import tuning
from specrouter.bench.http_client import check_url
from specrouter.bench.named_policies import POLICIES
from specrouter.bench.output_file import check_json
from specrouter.request.params import MAX_DEPTH, MAX_WIDTH

DEFAULT_BATCHES = (1, 4, 8, 16)
DEFAULT_POLICIES = ("target-only", "spec-4", "global-greedy", "goodput", "slo")
RECORDED_TOKENS = 256  # of a recorded output at most, unless the command line says otherwise


@dataclass(frozen=True, kw_only=True)
class ChainsOptions:
    """Attributes:
    workload: "agent" replays recorded outputs, those of `prompts` or the built-in ones; None has
        the models generate.
    batch: None takes those of `DEFAULT_BATCHES` that the configuration has rows for.
    only: names of contenders; None takes all.
    api_key: of the peer; None takes the environment's.
    json: "-" is stdout.
    fresh_times: models are timed anew.
    """

    config: Path
    prompts: tuple[Path, ...] = ()
    workload: Literal["agent"] | None = None
    batch: tuple[int, ...] | None = None
    rounds: int = 5
    new_tokens: int = 64
    temperature: float = 1.0
    only: tuple[str, ...] | None = None
    depths: tuple[int, ...] = tuning.DEPTHS
    widths: tuple[int, ...] = tuning.WIDTHS
    by_category: bool = False
    peer: str | None = None
    api_key: str | None = field(default=None, repr=False)
    plot: Path | None = None
    json: Path | None = None
    fresh_times: bool = False

    def __post_init__(self) -> None:
        if self.batch is not None:
            _check("--batch", self.batch, 1)
        _check("--rounds", [self.rounds], 1)
        _check("--new-tokens", [self.new_tokens], 1)
        _check("--depths", self.depths, 1, MAX_DEPTH)
        _check("--widths", self.widths, 1, MAX_WIDTH)
        _check("--temperature", [self.temperature], 0, 100)
        if not tuning.grid(self.depths, self.widths):
            raise ConfigError("--widths", "no depth times width is small enough for a tree")
        if self.api_key is not None and self.peer is None:
            raise ConfigError("--api-key", "goes with --peer")
        if self.workload is not None and self.temperature > 0:
            # Shared noise would have drafters draw by chance what the target does not choose by it.
            raise ConfigError("--temperature", "must be 0: --workload agent is recorded text")
        if self.workload is not None and self.peer is not None:
            raise ConfigError("--peer", "cannot replay the recorded text of --workload agent")
        check_json(self.json)

    def batches(self, max_requests: int) -> tuple[int, ...]:
        """Those to measure on `max_requests` rows. Raises `ConfigError` for one that is larger."""
        if self.batch is None:
            return tuple(batch for batch in DEFAULT_BATCHES if batch <= max_requests)
        for batch in self.batch:
            if batch > max_requests:
                reason = f"{batch} is above engine.max_requests, which is {max_requests}"
                raise ConfigError("--batch", reason)
        return self.batch


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Exactly one of `trace` and `poisson` is given.

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

    is_simulated: ClassVar[bool] = False
    known_policies: ClassVar[Collection[str]] = POLICIES

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
        self._check_arrivals()
        self._check_policies()
        self._check_server()
        _check("--requests", [self.requests], 1)
        _check("--skip", [self.skip], 0)
        _check("--rounds", [self.rounds], 1)
        _check("--seed", [self.seed], 0, 2**63)  # rounds count up from it
        if self.rows is not None:
            _check("--rows", [self.rows], 1)
        if self.output_tokens is not None:
            _check("--output-tokens", [self.output_tokens], 2)  # one has no time per token
        _check("--urgent-share", self.urgent_share or [0.0], 0, 1)
        if not (self.temperature == 0 or 0.01 <= self.temperature <= 100):
            raise ConfigError("--temperature", f"must be 0, or 0.01 to 100, not {self.temperature}")
        check_json(self.json)

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the runs that take turns."""
        return ("server",) if self.server is not None else self.policy or DEFAULT_POLICIES

    def _check_arrivals(self) -> None:
        if (self.trace is None) == (self.poisson is None):
            raise ConfigError("--trace", "give either --trace or --poisson")
        if self.poisson is not None and self.skip:
            raise ConfigError("--skip", "goes with --trace")
        if self.poisson is None and self.lengths is not None:
            raise ConfigError("--lengths", "goes with --poisson")
        for argument, value in {
            "--poisson": self.poisson,
            "--e2e-ms": self.e2e_ms,
            "--ttft-slowdown": self.ttft_slowdown,
            "--length-scale": self.length_scale,
            "--trace-baseline-ms": self.trace_baseline_ms,
        }.items():
            if value is not None:
                _check_positive(argument, [value])
        _check_positive("--scale", self.scale)
        _check_positive("--slo-scale", self.slo_scale)

    def _check_policies(self) -> None:
        for name in self.policy or ():
            if name not in self.known_policies:
                known = ", ".join(self.known_policies)
                raise ConfigError("--policy", f"{name!r} is none of {known}")
        if self.policy is not None and len(set(self.policy)) < len(self.policy):
            raise ConfigError("--policy", "names one twice")

    def _check_server(self) -> None:
        if self.server is None:
            if self.api_key is not None:
                raise ConfigError("--api-key", "goes with --server")
            return
        check_url("--server", self.server)
        its_own = {"--config": self.config, "--policy": self.policy, "--rows": self.rows}
        for argument, value in its_own.items():
            if value is not None:
                raise ConfigError(argument, "is the server's own: not with --server")


@dataclass(frozen=True, kw_only=True)
class TurnsOptions:
    """Attributes:
    history: tokens that the last turn repeats.
    said: tokens that each turn adds before its answer of `new_tokens`.
    rows: requests that KV memory is taken for.
    """

    config: Path
    chats: int = 12
    turns: int = 5
    history: int = 1500
    said: int = 48
    new_tokens: int = 16
    rows: int = 4
    temperature: float = 0.0
    json: Path | None = None
    fresh_times: bool = False

    def __post_init__(self) -> None:
        _check("--chats", [self.chats], 1)
        _check("--turns", [self.turns], 2)
        _check("--said", [self.said], 1)
        _check("--new-tokens", [self.new_tokens], 1)
        _check("--rows", [self.rows], 1)
        _check("--temperature", [self.temperature], 0, 100)
        if self.first < 1:
            before = self.history - self.first + 1
            raise ConfigError("--history", f"must be at least {before}: so much is said before")
        check_json(self.json)

    @property
    def first(self) -> int:
        """Tokens of the first turn's prompt."""
        return self.history - (self.turns - 1) * self.new_tokens - (self.turns - 2) * self.said

    @property
    def longest(self) -> int:
        """Tokens of the last turn, answer included."""
        return self.history + self.said + self.new_tokens


def _check(argument: str, values: Sequence[float], least: float, most: float | None = None) -> None:
    if not values:
        raise ConfigError(argument, "needs at least one value")
    for value in values:
        if not value >= least:  # NaN is not
            raise ConfigError(argument, f"must be at least {least}, not {value}")
        if most is not None and value > most:
            raise ConfigError(argument, f"must be at most {most}, not {value}")


def _check_positive(argument: str, values: Sequence[float]) -> None:
    if not values:
        raise ConfigError(argument, "needs at least one value")
    for value in values:
        if not 0 < value < math.inf:  # NaN is not
            raise ConfigError(argument, f"must be above 0, not {value}")
