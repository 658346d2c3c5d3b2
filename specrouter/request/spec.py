"""RequestSpec: a request as it was accepted, checked and complete. It never changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specrouter.request.objective import Objective
from specrouter.request.params import SamplingParams, Speculation
from specrouter.request.structure import TextForm

MAX_PRIORITY = 1000

SpeculationOverride = Speculation | Literal["off"] | None


class HandedKV:
    """Keys and values that were read elsewhere, for the row that goes on from them.

    They are taken once: they are large, and must not be kept for as long as their request.

    Attributes:
        is_checked: parts that do not fit the request have been left out.
    """

    def __init__(self, parts: "Sequence[RowKV]") -> None:
        """Keep the parts, in the order of their positions."""
        self.parts = list(parts)
        self.is_checked = False

    @property
    def tokens(self) -> int:
        """The most tokens that they cover; 0 if they have been taken."""
        return max((part.stop for part in self.parts), default=0)

    def take(self) -> "list[RowKV]":
        parts, self.parts = self.parts, []
        return parts


@dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """The tokens to start from, and how to go on from them.

    Attributes:
        generated: output tokens of earlier attempts.
        sample: 0 .. n - 1; the samples of one prompt share its seed, and each draws its own stream
            from it.
        bad_words_ids: all sequences that must not be generated, the texts of `params.bad_words`
            included.
        objective: None: best effort.
        priority: the lowest is admitted first; a step of it is worth ten seconds of waiting.
        timeout_s: time after which the request ends, waiting or running, with what it has.
        grammar: compiled `params.structure`.
        predicted: tokens that the output is expected to resemble.
        reuses_outputs: it may quote earlier outputs of its tenant, and later ones its own.
        elapsed_s: time since it was first submitted, here or elsewhere: its times and `timeout_s`
            count from then.
        arrivals: arrivals of the `generated` tokens: seconds after that, and how many came
            together. If there are none, times of tokens count from the first one of this attempt.
        prefill_only: it ends after its first token, and hands out the keys and values of all before
            it (`Delta.kv`), so that its text can go on elsewhere.
        kv: keys and values that were handed out so: their tokens need not be read.
    """

    token_ids: tuple[int, ...]
    generated: tuple[int, ...]
    params: SamplingParams
    speculation: SpeculationOverride
    seed: int
    sample: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    objective: Objective | None = None
    priority: int = 0
    timeout_s: float | None = None
    grammar: TextForm | None = None
    predicted: tuple[int, ...] = ()
    reuses_outputs: bool = True
    elapsed_s: float = 0.0
    arrivals: tuple[tuple[float, int], ...] = ()
    prefill_only: bool = False
    kv: HandedKV | None = None

    @property
    def committed(self) -> tuple[int, ...]:
        return self.token_ids + self.generated

    @property
    def most_tokens(self) -> int:
        """The output tokens at which it ends, those of earlier attempts included."""
        if self.prefill_only:
            return len(self.generated) + 1
        return self.params.max_new_tokens

    @property
    def total_tokens(self) -> int:
        """The most tokens of prompt and output."""
        return len(self.token_ids) + self.most_tokens


if TYPE_CHECKING:  # PyTorch takes seconds to import
    from statemgr import RowKV
