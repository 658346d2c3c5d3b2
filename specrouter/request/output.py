"""The results of a request: deltas while it runs, one output at its end.

Each has a one-line representation, and prints as its text: all fields of an output fill pages.
"""

import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from specrouter.request.objective import Objective
from specrouter.request.params import Chain

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from specrouter.request.receipt import Receipt
    from statemgr import RowKV

# "engine_dead": the engine failed while the request waited or ran.
FinishReason = Literal["eos", "stop", "length", "error", "cancelled", "timeout", "engine_dead"]

# Beginnings of the `error` of a request: its structure exceeded its limits or reached a dead end;
# its structure and bad words exclude each other; its objective will not be attained, and it asked
# to be rejected then.
STRUCTURE_FAILED = "the structure cannot go on"
NO_TOKEN_LEFT = "the sampling parameters leave no token to choose"
UNATTAINABLE = "the objective cannot be attained"
# The cause of an error by its beginning: a field of the request, or its objective.
BLAMED = (
    (STRUCTURE_FAILED, "structure"),
    (NO_TOKEN_LEFT, "bad_words"),
    (UNATTAINABLE, "unattainable"),
)

_SHORT = reprlib.Repr()
_SHORT.maxstring = 60  # characters of a text


class DecodeStep(NamedTuple):
    """A cycle of a request: one pass of the target.

    Attributes:
        chain: the chain that was used; its first model drafted.
        drafted: nodes that the target verified.
        committed: tokens that it chose, of which the last is its own and the others were drafted.
        produced: those of them that belong to the text, which may have ended before.
    """

    chain: Chain
    drafted: int
    committed: int
    produced: int


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """The metrics of one finished request.

    Attributes:
        ttft_ms: from submission to the first token; None if there was none.
        tpot_ms: mean time of a token after the first; None for fewer than two.
        acceptance_length: tokens committed per verification by the target, its own included.
        cycles: engine cycles in which the request decoded.
        chains: number of these cycles by chain.
        objective: the objective that it was judged by, if any.
        attained: whether the objective was; None without one. A request that ended in "error",
            "cancelled", "timeout" or "engine_dead" has not attained it.
        tpot_ms_every_10: mean time of a token over every full run of 10 after the first one.
        drafted_tokens: nodes that the target verified for the request.
        accepted_tokens: those of them that are part of the output.
        e2e_ms: from submission to the last token; None if there was none.
        attained_stages: for the objective's stages that had tokens, whether they kept their TPOT.
        cached_tokens: prompt tokens that the target did not read for it.
        steps: its cycles in this attempt, in order.
        sampling: temperature and others of `SAMPLING`, as they were used.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    acceptance_length: float = 0.0
    cycles: int = 0
    chains: dict[tuple[str, ...], int] = field(default_factory=dict)
    prompt_tokens: int
    output_tokens: int = 0
    objective: Objective | None = None
    attained: bool | None = None
    tpot_ms_every_10: tuple[float, ...] = ()
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    e2e_ms: float | None = None
    attained_stages: tuple[bool, ...] = ()
    cached_tokens: int = 0
    steps: tuple[DecodeStep, ...] = field(default=(), repr=False)
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second, from the submission to the last token."""
        return self.output_tokens / self.e2e_ms * 1000 if self.e2e_ms else None

    @property
    def speculative_decoding(self) -> dict[str, Any]:
        """The statistics under vLLM's names, and the same for each chain that drafted.

        Source: vLLM, docs/features/speculative_decoding/acceptance_metrics.md
        """
        chains = dict.fromkeys(step.chain for step in self.steps if step.drafted)
        return {
            **_acceptance(self.steps),
            "chains": {
                ">".join(chain): _acceptance([one for one in self.steps if one.chain == chain])
                for chain in chains
            },
        }

    def to_json(self) -> dict[str, Any]:
        own = {name: each for name, each in vars(self).items() if name != "steps"}
        return {
            **{name: list(each) if isinstance(each, tuple) else each for name, each in own.items()},
            "chains": {">".join(chain): count for chain, count in self.chains.items()},
            "objective": None if self.objective is None else asdict(self.objective),
            "speculative_decoding": self.speculative_decoding,
        }


def _acceptance(steps: Sequence[DecodeStep]) -> dict[str, Any]:
    """Return the statistics of the steps with drafted tokens, by vLLM's definitions.

    `num_spec_tokens` is the largest draft of a step, trees with all their nodes, since there is no
    fixed one; the histogram has an entry for each number of accepted tokens up to it.
    """
    drafts = [(step.drafted, step.committed - 1) for step in steps if step.drafted]
    drafted, accepted = (sum(counts) for counts in zip(*drafts, strict=True)) if drafts else (0, 0)
    longest = max((most for most, _ in drafts), default=0)
    counts = Counter(taken for _, taken in drafts)
    return {
        "mean_acceptance_length": 1.0 + accepted / max(len(drafts), 1),
        "draft_acceptance_rate": accepted / max(drafted, 1),
        "acceptance_histogram": [counts[taken] for taken in range(longest + 1)],
        "num_spec_steps": len(drafts),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": longest,
    }


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the target's, before any processing.

    `top` has the most likely ids, the likeliest first; the chosen one need not be among them.
    `logit`: the token's, in float32.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    logit: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CycleDraft:
    """The draft of a request in one cycle, and the part of it that the target accepted.

    Attributes:
        chain: the chain that was used, the target last.
        tokens: the n drafted nodes that the target verified, parents before children. None for a
            node quoted from another request's output, or below such a node, that was not accepted.
        parents: [n] the index of each node's parent; -1: the last token before the cycle.
        proposers: [n] the place in `chain` of the model that proposed each.
        probabilities: [n] probability of each after its parent, by the last model before the
            target; None where the token is.
        accepted: indices of the nodes that the target accepted, from the first level down. The
            token after them is the target's own.
        texts: text that each gained token adds, which may end before.
        cycle: its number among those in which this attempt gained tokens, from 1.
    """

    chain: tuple[str, ...]
    tokens: tuple[int | None, ...] = ()
    parents: tuple[int, ...] = ()
    proposers: tuple[int, ...] = ()
    probabilities: tuple[float | None, ...] = ()
    accepted: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    cycle: int = 0

    @property
    def proposed_by(self) -> tuple[str, ...]:
        """The proposer of each token that the request gained."""
        drafted = [self.chain[self.proposers[node]] for node in self.accepted]
        own = max(1, len(self.texts) - len(drafted))  # more than one if the trace was lost
        return (*drafted, *[self.chain[-1]] * own)[: len(self.texts)]


@dataclass(frozen=True)
class Feasible:
    """The earliest objective that could have been attained, in milliseconds; None: not known."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The whole output of a request.

    `seed` reproduces the text, whichever chains were used; `error` is set with "error" and
    "engine_dead".

    `index` numbers the samples of one prompt. `logprobs` is None unless asked for; it covers the
    tokens of this attempt, not those that came with the request as `generated`. So is
    `prompt_logprobs`, one entry for each token of the prompt: None for the first, which has no
    token before it.

    `error_field`, with "error", is the part of the request that is the cause, if any: the field
    "structure"; "unattainable", if it asked to be rejected if its objective cannot be attained.

    `feasible`, with "unattainable" for `error_field`, is what could have been attained instead of
    the request's objective.

    `stop_reason`, with "stop", is the text of `stop` or the id of `stop_token_ids` that ended it.

    `drafts` is None unless asked for; it covers the cycles of this attempt, in order.

    `receipt` is None unless asked for, and if the request failed or has no tokens.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason
    metrics: RequestMetrics
    seed: int
    error: str | None = None
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stop_reason: str | int | None = None
    error_field: str | None = None
    feasible: Feasible | None = None
    drafts: list[CycleDraft] | None = None
    receipt: "Receipt | None" = None

    def __repr__(self) -> str:
        """Return e.g. `Text('a, b = b, a + b', 24 tokens, length, 310.2 tokens/s)`."""
        shown = [_SHORT.repr(self.text), f"{len(self.token_ids)} tokens", self.finish_reason]
        if self.metrics.tokens_per_s is not None:
            shown.append(f"{self.metrics.tokens_per_s:.1f} tokens/s")
        if self.error is not None:
            shown.append(f"error={self.error!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Delta:
    """News of a request; the last one has the finish reason and the whole output.

    `index` is the sample's; `logprobs`, if asked for, has as many entries as `token_ids`;
    `prompt_logprobs`, if asked for, comes with the first tokens; `draft`, if asked for, with the
    tokens of its cycle.

    For a request that is `prefill_only`: `kv` has what was read since the last such delta, and
    comes before the end; `goes_on` is set with the end, unless the text ends there, too.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    kv: "RowKV | None" = None
    goes_on: bool = False
    draft: CycleDraft | None = None

    def __repr__(self) -> str:
        """Return e.g. `Delta('a, b', 4 tokens)`; the last one with its output."""
        shown = [_SHORT.repr(self.text), f"{len(self.token_ids)} tokens"]
        shown += [f"index={self.index}"] if self.index else []
        shown += [repr(self.output)] if self.output is not None else []
        return f"Delta({', '.join(shown)})"

    def __str__(self) -> str:
        return self.text
