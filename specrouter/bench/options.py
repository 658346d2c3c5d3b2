"""What `specrouter bench chains` is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from modelpool.errors import ConfigError
from specrouter.bench import tuning
from specrouter.bench.output_file import check_json
from specrouter.request.params import MAX_DEPTH, MAX_WIDTH

DEFAULT_BATCHES = (1, 4, 8, 16)
RECORDED_TOKENS = 256  # of a recorded output at most, unless the command line says otherwise


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    `workload`: "agent" replays recorded outputs, those of `prompts` or the built-in ones; None has
    the models generate. `batch`: None takes those of `DEFAULT_BATCHES` that the configuration has
    rows for. `only`: names of contenders; None takes all. `api_key`: of the peer; None takes the
    environment's. `json`: "-" is stdout. `fresh_times`: models are timed anew.
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
    min_distinct: float = 0.5
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
        _check("--min-distinct", [self.min_distinct], 0, 1)
        _check("--temperature", [self.temperature], 0, 100)
        if not tuning.grid(self.depths, self.widths):
            raise ConfigError("--widths", "no depth times width is small enough for a tree")
        if self.api_key is not None and self.peer is None:
            raise ConfigError("--api-key", "goes with --peer")
        if self.workload is not None:
            self._check_recorded()
        check_json(self.json)

    def _check_recorded(self) -> None:
        if self.temperature > 0:
            # Shared noise would have drafters draw by chance what the target does not choose by it.
            raise ConfigError("--temperature", "must be 0: --workload agent is recorded text")
        if self.peer is not None:
            raise ConfigError("--peer", "cannot replay the recorded text of --workload agent")

    def batches(self, max_requests: int) -> tuple[int, ...]:
        """Those to measure on `max_requests` rows. Raises `ConfigError` for one that is larger."""
        if self.batch is None:
            return tuple(batch for batch in DEFAULT_BATCHES if batch <= max_requests)
        for batch in self.batch:
            if batch > max_requests:
                reason = f"{batch} is above engine.max_requests, which is {max_requests}"
                raise ConfigError("--batch", reason)
        return self.batch


def _check(argument: str, values: Sequence[float], least: float, most: float | None = None) -> None:
    if not values:
        raise ConfigError(argument, "needs at least one value")
    for value in values:
        if not value >= least:  # NaN is not
            raise ConfigError(argument, f"must be at least {least}, not {value}")
        if most is not None and value > most:
            raise ConfigError(argument, f"must be at most {most}, not {value}")
