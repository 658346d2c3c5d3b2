"""Requests as callers make them, one per prompt, before any check."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import length_hint
from typing import Any

from specrouter.request.lanes import Lane, lane_of
from specrouter.request.objective import SLO, Objective, SloLike
from specrouter.request.params import RequestError, SamplingParams, Speculation
from specrouter.request.spec import HandedKV, SpeculationOverride

PromptLike = str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for one prompt; see `ChainRouter.submit`. Its samples become `RequestSpec`s.

    Attributes:
        model: name of the model that is to serve it; None: the target.
        is_tokenized: the prompt is ids from the pool's own tokenizer, or ids that were checked
            before: only their range is checked.
        sample: index of the sample to serve, of `params.n`; None: all of them.
        generated, elapsed_s, arrivals: results of earlier attempts; see `RequestSpec`.
        prefill_only, kv: see `RequestSpec`.
    """

    prompt: PromptLike
    params: SamplingParams | None
    speculation: SpeculationOverride
    slo: SloLike | Objective
    priority: int = 0
    timeout_s: float | None = None
    generated: Sequence[int] = ()
    sample: int | None = None
    elapsed_s: float = 0.0
    arrivals: tuple[tuple[float, int], ...] = ()
    prefill_only: bool = False
    kv: HandedKV | None = None
    model: str | None = None
    is_tokenized: bool = False


def args_of_each(
    prompts: PromptLike | Sequence[PromptLike],
    params: SamplingParams | Sequence[SamplingParams] | None,
    speculation: SpeculationOverride | Sequence[SpeculationOverride],
    slo: SloLike | Sequence[SloLike],
    priority: int,
    timeout_s: float | None,
) -> list[Request]:
    """Split a call with several prompts into requests; see `ChainRouter.generate`.

    Raises:
        RequestError: an option is neither one for all prompts nor one for each.
    """
    several = _as_prompts(prompts)
    each = zip(
        several,
        _one_each("params", params, SamplingParams, several),
        _one_each("speculation", speculation, (Speculation, str), several),
        _one_each("slo", slo, (SLO, str), several),
        strict=True,
    )
    return [
        Request(
            prompt=prompt,
            params=own,
            speculation=override,
            slo=objective,
            priority=priority,
            timeout_s=timeout_s,
        )
        for prompt, own, override, objective in each
    ]


def lane_for(asked: Sequence[Request]) -> Lane:
    """Return the lane in which requests are tokenized and checked."""
    if any(one.params is not None and one.params.structure is not None for one in asked):
        return "structures"
    overrides = {id(one.speculation): one.speculation for one in asked}.values()
    predicted = (one.prediction or "" for one in overrides if isinstance(one, Speculation))
    return lane_of(sum(map(length_hint, (*(one.prompt for one in asked), *predicted))))


def _as_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError("prompts", f"must be texts or lists of ids, not {prompts!r}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(field: str, value: Any, single: Any, prompts: Sequence[PromptLike]) -> list[Any]:
    """Return `value` for every prompt, or its elements if it is a sequence of as many."""
    if value is None or isinstance(value, single):
        return [value] * len(prompts)
    if not isinstance(value, Sequence):
        raise RequestError(field, f"must be one for all prompts or one for each, not {value!r}")
    if len(value) != len(prompts):
        raise RequestError(field, f"{len(value)} given for {len(prompts)} prompts")
    return list(value)
