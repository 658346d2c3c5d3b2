"""What `specrouter bench chains`, `load` and `turns` are asked for.

Contract: each field is an option of the command line, with its help. Options that make no sense
raise a `ConfigError` that names the argument. Imports nothing that takes long: `--help` comes at
once.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelpool.errors import ConfigError

DEFAULT_BATCHES = (1, 4, 8, 16)

POSITIVE = (math.ulp(0.0), math.nextafter(math.inf, 0.0))
JSON = "write all figures and the conditions; - prints them as the last line"
BUILT_IN_PROMPTS = "(default: a dozen built-in prompts)"


def option(
    default: Any,
    metavar: str,
    text: str = "",
    bounds: tuple[float, float] | None = None,
    is_secret: bool = False,
) -> Any:
    """Declare a field that is an option; one whose default is MISSING is required.

    Args:
        bounds: the least and the most of it, or of each of several.
    """
    told = {"metavar": metavar, "help": text, "bounds": bounds}
    return field(default=default, repr=not is_secret, metadata=told)


def count(default: int | None, text: str = "", least: int = 1) -> Any:
    """Declare an option that is a whole number."""
    return option(default, "N", text, (least, math.inf))


@dataclass(frozen=True, kw_only=True)
class ChainsOptions:
    """`batch`: None takes those of `DEFAULT_BATCHES` that the configuration has rows for. `only`:
    None takes all. `fresh_times`: models are timed anew."""

    config: Path
    prompts: tuple[Path, ...] = option(
        (), "FILE",
        "JSON lines with prompt, question, text or turns; each file is a category "
        + BUILT_IN_PROMPTS,
    )  # fmt: skip
    batch: tuple[int, ...] | None = option(
        None, "B",
        "requests together (default: 1 4 8 16, up to the config's engine.max_requests)",
        (1, math.inf),
    )  # fmt: skip
    rounds: int = count(5)
    new_tokens: int = count(64, "of each output")
    temperature: float = option(1.0, "T", "0 is greedy", (0, 100))
    by_category: bool = option(
        False, "", "batches of one category each; ratios are means over categories"
    )
    only: tuple[str, ...] | None = option(
        None, "NAME",
        "adaptive, static (all chains), A>B>C, or a chain policy of one's own "
        "(package.module:NAME); the target alone (off) always takes part",
    )  # fmt: skip
    json: Path | None = option(None, "FILE", JSON)
    fresh_times: bool = False

    def __post_init__(self) -> None:
        check(self)

    def batches(self, max_requests: int) -> tuple[int, ...]:
        """Those to measure on `max_requests` rows. Raises `ConfigError` for one that is larger."""
        if self.batch is None:
            return tuple(batch for batch in DEFAULT_BATCHES if batch <= max_requests)
        for batch in self.batch:
            if batch > max_requests:
                reason = f"{batch} is above engine.max_requests, which is {max_requests}"
                raise refusal("--batch", reason)
        return self.batch


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """`config`: None with a server, which has its own. `fresh_times`: models are timed anew."""

    config: Path | None
    poisson: float = option(MISSING, "RATE", "requests per second, at random times", POSITIVE)
    requests: int = count(200)
    prompts: tuple[Path, ...] = option(
        (), "FILE",
        "JSON lines with prompt, question, text or turns; each file is a category "
        + BUILT_IN_PROMPTS,
    )  # fmt: skip
    input_tokens: int | None = count(
        None, "of each prompt, cut or repeated to it (default: the prompts' own)"
    )
    output_tokens: int = count(64, "of each request", least=2)  # one has no time per token
    tpot_ms: float | None = option(
        None, "MS", "objective: mean time of a token after the first", POSITIVE
    )
    ttft_ms: float | None = option(None, "MS", "objective: time to the first token", POSITIVE)
    e2e_ms: float | None = option(None, "MS", "objective: time to the last token", POSITIVE)
    rounds: int = count(1, "of the same requests, with speculation and without")
    temperature: float = option(1.0, "T", "0 is greedy", (0, 100))
    seed: int = option(0, "S", bounds=(0, 2**63))  # rounds count up from it
    server: str | None = option(
        None, "URL",
        "a running specrouter server, under its own configuration, instead of a router here",
    )  # fmt: skip
    api_key: str | None = option(
        None, "KEY", "of that server (default: SPECROUTER_API_KEY)", is_secret=True
    )
    json: Path | None = option(None, "FILE", JSON)
    fresh_times: bool = False

    def __post_init__(self) -> None:
        check(self)
        if self.server is None:
            if self.api_key is not None:
                raise refusal("--api-key", "goes with --server")
            return
        from specrouter.http_client import check_url

        check_url("--server", self.server)
        if self.config is not None:
            raise refusal("--config", "is the server's own: not with --server")


@dataclass(frozen=True, kw_only=True)
class TurnsOptions:
    """A turn adds `said` tokens before its answer of `new_tokens`. `fresh_times`: models are timed
    anew."""

    config: Path
    chats: int = count(12, "conversations")
    turns: int = count(5, "of each", least=2)
    history: int = count(1500, "tokens that the last turn repeats")
    said: int = count(48, "new tokens of a turn")
    new_tokens: int = count(16, "of an answer")
    rows: int = count(4, "requests of that length that KV memory is taken for")
    temperature: float = option(0.0, "T", "0 is greedy", (0, 100))
    json: Path | None = option(None, "FILE", JSON)
    fresh_times: bool = False

    def __post_init__(self) -> None:
        check(self)
        if self.first < 1:
            before = self.history - self.first + 1
            raise refusal("--history", f"must be at least {before}: so much is said before")

    @property
    def first(self) -> int:
        """Tokens of the first turn's prompt."""
        return self.history - (self.turns - 1) * self.new_tokens - (self.turns - 2) * self.said

    @property
    def longest(self) -> int:
        """Tokens of the last turn, answer included."""
        return self.history + self.said + self.new_tokens


def flag(name: str) -> str:
    """How the command line calls a field."""
    return f"--{name.replace('_', '-')}"


def check(options: Any) -> None:
    """Check bounds, and the file for the figures. Raises `ConfigError`."""
    from specrouter.bench.output_file import STDOUT, check_writable
    from specrouter.request.params import LEAST_TEMPERATURE

    for one in fields(options):
        bounds, given = one.metadata.get("bounds"), getattr(options, one.name)
        for value in given if isinstance(given, tuple) else (given,):
            if bounds is not None and value is not None:
                _check_bounds(flag(one.name), value, *bounds)
        if one.name == "temperature" and 0.0 < given < LEAST_TEMPERATURE:
            raise refusal("--temperature", f"must be 0 or at least {LEAST_TEMPERATURE:g}")
    if options.json is not None and options.json != STDOUT:
        check_writable("--json", options.json)


def _check_bounds(argument: str, value: float, least: float, most: float) -> None:
    if (least, most) == POSITIVE and not least <= value <= most:  # NaN is not
        raise refusal(argument, f"must be above 0, not {value}")
    if not value >= least:
        raise refusal(argument, f"must be at least {least}, not {value}")
    if value > most:
        raise refusal(argument, f"must be at most {most}, not {value}")


def refusal(argument: str, reason: str) -> ConfigError:
    """What is raised for an argument."""
    from modelpool.errors import ConfigError

    return ConfigError(argument, reason)
