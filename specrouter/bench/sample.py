"""What one contender did with one batch, and what the engine says of the time that it took."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

NGRAM = 4


class MeasurementError(RuntimeError):
    """A contender failed."""


class EngineStatistics(Protocol):
    """Totals since the engine's start, as `ChainRouter.statistics` gives them."""

    @property
    def cycles(self) -> int: ...
    @property
    def cycle_ms(self) -> float: ...
    @property
    def model_ms(self) -> Mapping[str, float]: ...
    @property
    def logits_ms(self) -> float: ...
    @property
    def committed_tokens(self) -> int: ...
    @property
    def target_passes(self) -> int: ...
    @property
    def forwards(self) -> Mapping[str, int]: ...
    @property
    def pack_tokens(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class EngineTime:
    """What the engine spent on some runs. Times in ms; by model where it is a mapping.

    Attributes:
        cycle_ms: whole cycles, bookkeeping included.
        model_ms: in the models' forwards.
        logits_ms: on noise, penalties, softmax, top-k.
        forwards: how many there were; `pack_tokens`: the tokens that they read.
    """

    cycles: int = 0
    cycle_ms: float = 0.0
    model_ms: Mapping[str, float] = field(default_factory=dict)
    logits_ms: float = 0.0
    committed_tokens: int = 0
    target_passes: int = 0
    forwards: Mapping[str, int] = field(default_factory=dict)
    pack_tokens: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def between(cls, before: EngineStatistics, after: EngineStatistics) -> "EngineTime":
        return cls(
            after.cycles - before.cycles,
            after.cycle_ms - before.cycle_ms,
            {name: ms - before.model_ms.get(name, 0.0) for name, ms in after.model_ms.items()},
            after.logits_ms - before.logits_ms,
            after.committed_tokens - before.committed_tokens,
            after.target_passes - before.target_passes,
            {name: n - before.forwards.get(name, 0) for name, n in after.forwards.items()},
            {name: n - before.pack_tokens.get(name, 0) for name, n in after.pack_tokens.items()},
        )

    @classmethod
    def total(cls, parts: Iterable["EngineTime"]) -> "EngineTime":
        found = list(parts)
        model_ms: Counter[str] = Counter()  # adds floats too
        forwards: Counter[str] = Counter()
        pack_tokens: Counter[str] = Counter()
        for part in found:
            model_ms.update(part.model_ms)
            forwards.update(part.forwards)
            pack_tokens.update(part.pack_tokens)
        return cls(
            sum(part.cycles for part in found),
            sum(part.cycle_ms for part in found),
            dict(model_ms),
            sum(part.logits_ms for part in found),
            sum(part.committed_tokens for part in found),
            sum(part.target_passes for part in found),
            dict(forwards),
            dict(pack_tokens),
        )

    def mean_pack(self, model: str) -> float:
        """Tokens of this model's forwards, on average."""
        return self.pack_tokens[model] / self.forwards[model]

    def used_models(self) -> list[str]:
        return [name for name, count in self.forwards.items() if count > 0]


@dataclass(frozen=True)
class Sample:
    """One batch of one contender.

    Attributes:
        tokens: of all outputs.
        seconds: from the first request's start to the last one's end.
        distinct: of each output, the share of its 4-grams that are distinct.
        acceptance_length: tokens per target pass, the mean over outputs; None where unknown.
        chains: request cycles by chain.
        requests: how many the batch had.
        tpot_ms: mean time of a token after the first, the mean over outputs; None where unknown.
    """

    tokens: int
    seconds: float
    distinct: tuple[float, ...] = ()
    acceptance_length: float | None = None
    engine: EngineTime | None = None
    chains: Mapping[str, int] = field(default_factory=dict)
    requests: int = 1
    tpot_ms: float | None = None


def distinct_share(token_ids: Sequence[int]) -> float:
    """Distinct 4-grams over all of them; 1 for an output that is too short to have two."""
    grams = [tuple(token_ids[i : i + NGRAM]) for i in range(len(token_ids) - NGRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
