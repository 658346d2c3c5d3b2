"""What `python -m research chains`, `load` and `simulate` are asked for.

Contract: that of `specrouter.bench.options`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from research.bench import tuning
from research.policies.named import LIVE
from specrouter.bench.options import (
    BUILT_IN_PROMPTS,
    JSON,
    POSITIVE,
    ChainsOptions,
    check,
    count,
    option,
    refusal,
)
from specrouter.request.params import MAX_DEPTH, MAX_WIDTH

DEFAULT_POLICIES = ("target-only", "spec-4", "global-greedy", "goodput", "slo")
RECORDED_TOKENS = 256  # of a recorded output at most, unless the command line says otherwise


@dataclass(frozen=True, kw_only=True)
class LineupOptions(ChainsOptions):
    """`only`: None takes all."""

    workload: Literal["agent"] | None = option(
        None, "",
        "recorded outputs are replayed, part by part, greedy: code edits, tool-call echoes, JSON, "
        "turns; or those of --prompts, lines with prompt and output",
    )  # fmt: skip
    only: tuple[str, ...] | None = option(
        None, "NAME",
        "transformers, assisted, assisted:DRAFTER, static, A>B>C, smallest, tuned, adaptive, or a "
        "chain policy of one's own (package.module:NAME); the target alone (off) always takes part",
    )  # fmt: skip
    depths: tuple[int, ...] = option(
        tuning.DEPTHS, "N", "among which a static chain's best is found", (1, MAX_DEPTH)
    )
    widths: tuple[int, ...] = option(
        tuning.WIDTHS, "N", "among which a static chain's best is found", (1, MAX_WIDTH)
    )
    peer: str | None = option(
        None, "URL",
        "a server with OpenAI's completions, as a contender; llama-server=URL: llama.cpp's, on "
        "exported weights, asked for the same work as the engine",
    )  # fmt: skip
    api_key: str | None = option(
        None, "KEY", "of that server (default: OPENAI_API_KEY)", is_secret=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not tuning.grid(self.depths, self.widths):
            raise refusal("--widths", "no depth times width is small enough for a tree")
        if self.api_key is not None and self.peer is None:
            raise refusal("--api-key", "goes with --peer")
        if self.workload is not None and self.temperature > 0:
            # Shared noise would have drafters draw by chance what the target does not choose by it.
            raise refusal("--temperature", "must be 0: --workload agent is recorded text")
        if self.workload is not None and self.peer is not None:
            raise refusal("--peer", "cannot replay the recorded text of --workload agent")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Exactly one of `trace` and `poisson` is given.

    Every value of `scale` is a point of the sweep. `config`: None on a simulated machine.
    `fresh_times`: models are timed anew.
    """

    is_simulated: ClassVar[bool] = False
    known_policies: ClassVar[Collection[str]] = LIVE

    config: Path | None
    trace: Path | None = option(None, "FILE", "a CSV file of AdaServe's or of Azure's format")
    poisson: float | None = option(None, "RATE", "requests per second, at random times", POSITIVE)
    scale: tuple[float, ...] = option(
        (1.0,), "X",
        "times the gaps between requests: 2 halves the rate; several are a sweep", POSITIVE,
    )  # fmt: skip
    requests: int = count(200)
    skip: int = count(0, "of the trace, from its start", least=0)
    e2e_ms: float | None = option(
        None, "MS",
        "objective: time to the last token of every request, in addition to the trace's objectives",
        POSITIVE,
    )  # fmt: skip
    ttft_slowdown: float | None = option(
        None, "F",
        "objective: time to the first token of every request, as so many times that of a prompt "
        "of its length alone", POSITIVE,
    )  # fmt: skip
    trace_baseline_ms: float = option(
        30.0, "MS", "baseline latency behind the trace's objectives in milliseconds", POSITIVE
    )
    output_tokens: int | None = count(  # one has no time per token
        None, "of each request (default: the trace's, times the length scale)", least=2
    )
    length_scale: float = option(0.25, "F", "times the trace's lengths", POSITIVE)
    prompts: tuple[Path, ...] = option(
        (), "FILE",
        "JSON lines; chosen by the trace's categories, cut or repeated to its lengths "
        + BUILT_IN_PROMPTS,
    )  # fmt: skip
    rounds: int = count(1)
    temperature: float = option(1.0, "T", "0 is greedy", (0, 100))
    seed: int = option(0, "S", bounds=(0, 2**63))  # rounds count up from it
    rows: int | None = count(None, "requests together (default: the config's)")
    policy: tuple[str, ...] | None = option(
        None, "NAME",
        f"{', '.join(LIVE)} (default: {' '.join(DEFAULT_POLICIES)})",
    )  # fmt: skip
    json: Path | None = option(None, "FILE", JSON)
    fresh_times: bool = False

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.poisson is None):
            raise refusal("--trace", "give either --trace or --poisson")
        if self.poisson is not None and self.skip:
            raise refusal("--skip", "goes with --trace")
        self._check_policies()
        check(self)

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the runs that take turns."""
        return self.policy or DEFAULT_POLICIES

    def _check_policies(self) -> None:
        for name in self.policy or ():
            if name not in self.known_policies:
                known = ", ".join(self.known_policies)
                raise refusal("--policy", f"{name!r} is none of {known}")
        if self.policy is not None and len(set(self.policy)) < len(self.policy):
            raise refusal("--policy", "names one twice")
