"""What `specrouter bench chains`, `load` and `turns` are asked for.

Contract: each field is an option of the command line, with its help. Options that make no sense
raise a `ConfigError` that names the argument. Imports nothing that takes long: `--help` comes at
once.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from specrouter.bench import tuning
from specrouter.bench.named_policies import POLICIES
from specrouter.request.params import LEAST_TEMPERATURE, MAX_DEPTH, MAX_WIDTH

if TYPE_CHECKING:
    from modelpool.errors import ConfigError

DEFAULT_BATCHES = (1, 4, 8, 16)
DEFAULT_POLICIES = ("target-only", "spec-4", "global-greedy", "goodput", "slo")
RECORDED_TOKENS = 256  # of a recorded output at most, unless the command line says otherwise

_POSITIVE = (math.ulp(0.0), math.nextafter(math.inf, 0.0))
_JSON = "write all figures and the conditions; - prints them as the last line"
_PROMPTS = "(default: a dozen built-in prompts)"


def _option(
    default: Any,
    metavar: str,
    text: str = "",
    bounds: tuple[float, float] | None = None,
    is_secret: bool = False,
) -> Any:
    """A field that is an option. `bounds`: the least and the most of it, or of each of several."""
    told = {"metavar": metavar, "help": text, "bounds": bounds}
    return field(default=default, repr=not is_secret, metadata=told)


def _count(default: int | None, text: str = "", least: int = 1) -> Any:
    return _option(default, "N", text, (least, math.inf))


@dataclass(frozen=True, kw_only=True)
class ChainsOptions:
    """`batch`: None takes those of `DEFAULT_BATCHES` that the configuration has rows for. `only`:
    None takes all. `fresh_times`: models are timed anew."""

    config: Path
    prompts: tuple[Path, ...] = _option(
        (), "FILE",
        f"JSON lines with prompt, question, text or turns; each file is a category {_PROMPTS}",
    )  # fmt: skip
    workload: Literal["agent"] | None = _option(
        None, "",
        "recorded outputs are replayed, part by part, greedy: code edits, tool-call echoes, JSON, "
        "turns; or those of --prompts, lines with prompt and output",
    )  # fmt: skip
    batch: tuple[int, ...] | None = _option(
        None, "B",
        "requests together (default: 1 4 8 16, up to the config's engine.max_requests)",
        (1, math.inf),
    )  # fmt: skip
    rounds: int = _count(5)
    new_tokens: int = _count(64, f"of each output; up to {RECORDED_TOKENS} of a recorded one")
    temperature: float = _option(1.0, "T", "0 is greedy, as recorded outputs are", (0, 100))
    by_category: bool = _option(
        False, "", "batches of one category each; ratios are means over categories"
    )
    only: tuple[str, ...] | None = _option(
        None, "NAME",
        "transformers, assisted, assisted:DRAFTER, static, A>B>C, smallest, tuned, adaptive, or a "
        "chain policy of one's own (package.module:NAME); the target alone (off) always takes part",
    )  # fmt: skip
    depths: tuple[int, ...] = _option(
        tuning.DEPTHS, "N", "among which a static chain's best is found", (1, MAX_DEPTH)
    )
    widths: tuple[int, ...] = _option(
        tuning.WIDTHS, "N", "among which a static chain's best is found", (1, MAX_WIDTH)
    )
    peer: str | None = _option(
        None, "URL",
        "a server with OpenAI's completions, as a contender; llama-server=URL: llama.cpp's, on "
        "exported weights, asked for the same work as the engine",
    )  # fmt: skip
    api_key: str | None = _option(
        None, "KEY", "of that server (default: OPENAI_API_KEY)", is_secret=True
    )
    plot: Path | None = _option(None, "FILE.png", "draw speed-ups by batch size; needs matplotlib")
    json: Path | None = _option(None, "FILE", _JSON)
    fresh_times: bool = False

    def __post_init__(self) -> None:
        _check(self)
        if not tuning.grid(self.depths, self.widths):
            raise _refusal("--widths", "no depth times width is small enough for a tree")
        if self.api_key is not None and self.peer is None:
            raise _refusal("--api-key", "goes with --peer")
        if self.workload is not None and self.temperature > 0:
            # Shared noise would have drafters draw by chance what the target does not choose by it.
            raise _refusal("--temperature", "must be 0: --workload agent is recorded text")
        if self.workload is not None and self.peer is not None:
            raise _refusal("--peer", "cannot replay the recorded text of --workload agent")

    def batches(self, max_requests: int) -> tuple[int, ...]:
        """Those to measure on `max_requests` rows. Raises `ConfigError` for one that is larger."""
        if self.batch is None:
            return tuple(batch for batch in DEFAULT_BATCHES if batch <= max_requests)
        for batch in self.batch:
            if batch > max_requests:
                reason = f"{batch} is above engine.max_requests, which is {max_requests}"
                raise _refusal("--batch", reason)
        return self.batch


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Exactly one of `trace` and `poisson` is given.

    Every value of `scale`, of `urgent_share` (none: as the trace has it) and of `slo_scale` is a
    point of the sweep. `e2e_ms` and `ttft_slowdown` are times `slo_scale`, too. `config`: None with
    a server, which has its own. `fresh_times`: models are timed anew.
    """

    is_simulated: ClassVar[bool] = False
    known_policies: ClassVar[Collection[str]] = POLICIES

    config: Path | None
    trace: Path | None = _option(None, "FILE", "a CSV file of AdaServe's or of Azure's format")
    poisson: float | None = _option(None, "RATE", "requests per second, at random times", _POSITIVE)
    lengths: Literal["adaserve", "specrouter"] | None = _option(
        None, "",
        "of Poisson arrivals: AdaServe's mix with its objectives (default), or the four datasets "
        "of SpecRouter's evaluation, without objectives",
    )  # fmt: skip
    scale: tuple[float, ...] = _option(
        (1.0,), "X",
        "times the gaps between requests: 2 halves the rate; several are a sweep", _POSITIVE,
    )  # fmt: skip
    requests: int = _count(200)
    skip: int = _count(0, "of the trace, from its start", least=0)
    urgent_share: tuple[float, ...] = _option(
        (), "SHARE",
        "of the category with the tightest objective, redrawn (default: the trace's)", (0, 1),
    )  # fmt: skip
    e2e_ms: float | None = _option(
        None, "MS",
        "objective: time to the last token of every request, in addition to the trace's objectives",
        _POSITIVE,
    )  # fmt: skip
    ttft_slowdown: float | None = _option(
        None, "F",
        "objective: time to the first token of every request, as so many times that of a prompt "
        "of its length alone", _POSITIVE,
    )  # fmt: skip
    slo_scale: tuple[float, ...] = _option((1.0,), "F", "times all objectives", _POSITIVE)
    trace_baseline_ms: float = _option(
        30.0, "MS", "baseline latency behind the trace's objectives in milliseconds", _POSITIVE
    )
    output_tokens: int | None = _count(  # one has no time per token
        None, "of each request (default: the trace's, times the length scale)", least=2
    )
    length_scale: float = _option(0.25, "F", "times the trace's lengths", _POSITIVE)
    prompts: tuple[Path, ...] = _option(
        (), "FILE",
        f"JSON lines; chosen by the trace's categories, cut or repeated to its lengths {_PROMPTS}",
    )  # fmt: skip
    rounds: int = _count(1)
    temperature: float = _option(1.0, "T", "0 is greedy", (0, 100))
    seed: int = _option(0, "S", bounds=(0, 2**63))  # rounds count up from it
    rows: int | None = _count(None, "requests together (default: the config's)")
    policy: tuple[str, ...] | None = _option(
        None, "NAME",
        f"{', '.join(POLICIES)} (default: {' '.join(DEFAULT_POLICIES)})",
    )  # fmt: skip
    server: str | None = _option(
        None, "URL",
        "a running specrouter server, under its own configuration, instead of a router here",
    )  # fmt: skip
    api_key: str | None = _option(
        None, "KEY", "of that server (default: SPECROUTER_API_KEY)", is_secret=True
    )
    plot: Path | None = _option(
        None, "FILE.png",
        "draw a run over time; of a sweep also FILE-rate.png, -urgent.png, -slo.png; needs "
        "matplotlib",
    )  # fmt: skip
    json: Path | None = _option(None, "FILE", _JSON)
    fresh_times: bool = False

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.poisson is None):
            raise _refusal("--trace", "give either --trace or --poisson")
        if self.poisson is not None and self.skip:
            raise _refusal("--skip", "goes with --trace")
        if self.poisson is None and self.lengths is not None:
            raise _refusal("--lengths", "goes with --poisson")
        self._check_policies()
        self._check_server()
        _check(self)

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the runs that take turns."""
        return ("server",) if self.server is not None else self.policy or DEFAULT_POLICIES

    def _check_policies(self) -> None:
        for name in self.policy or ():
            if name not in self.known_policies:
                known = ", ".join(self.known_policies)
                raise _refusal("--policy", f"{name!r} is none of {known}")
        if self.policy is not None and len(set(self.policy)) < len(self.policy):
            raise _refusal("--policy", "names one twice")

    def _check_server(self) -> None:
        if self.server is None:
            if self.api_key is not None:
                raise _refusal("--api-key", "goes with --server")
            return
        from specrouter.http_client import check_url

        check_url("--server", self.server)
        its_own = {"--config": self.config, "--policy": self.policy, "--rows": self.rows}
        for argument, value in its_own.items():
            if value is not None:
                raise _refusal(argument, "is the server's own: not with --server")


@dataclass(frozen=True, kw_only=True)
class TurnsOptions:
    """A turn adds `said` tokens before its answer of `new_tokens`. `fresh_times`: models are timed
    anew."""

    config: Path
    chats: int = _count(12, "conversations")
    turns: int = _count(5, "of each", least=2)
    history: int = _count(1500, "tokens that the last turn repeats")
    said: int = _count(48, "new tokens of a turn")
    new_tokens: int = _count(16, "of an answer")
    rows: int = _count(4, "requests of that length that KV memory is taken for")
    temperature: float = _option(0.0, "T", "0 is greedy", (0, 100))
    json: Path | None = _option(None, "FILE", _JSON)
    fresh_times: bool = False

    def __post_init__(self) -> None:
        _check(self)
        if self.first < 1:
            before = self.history - self.first + 1
            raise _refusal("--history", f"must be at least {before}: so much is said before")

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


def _check(options: ChainsOptions | LoadOptions | TurnsOptions) -> None:
    """Bounds, and the file for the figures. Raises `ConfigError`."""
    from specrouter.bench.output_file import STDOUT, check_writable

    for one in fields(options):
        bounds, given = one.metadata.get("bounds"), getattr(options, one.name)
        for value in given if isinstance(given, tuple) else (given,):
            if bounds is not None and value is not None:
                _check_bounds(flag(one.name), value, *bounds)
        if one.name == "temperature" and 0.0 < given < LEAST_TEMPERATURE:
            raise _refusal("--temperature", f"must be 0 or at least {LEAST_TEMPERATURE:g}")
    if options.json is not None and options.json != STDOUT:
        check_writable("--json", options.json)


def _check_bounds(argument: str, value: float, least: float, most: float) -> None:
    if (least, most) == _POSITIVE and not least <= value <= most:  # NaN is not
        raise _refusal(argument, f"must be above 0, not {value}")
    if not value >= least:
        raise _refusal(argument, f"must be at least {least}, not {value}")
    if value > most:
        raise _refusal(argument, f"must be at most {most}, not {value}")


def _refusal(argument: str, reason: str) -> ConfigError:
    from modelpool.errors import ConfigError

    return ConfigError(argument, reason)
