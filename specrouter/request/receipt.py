"""Receipt: the data to compute a text again, elsewhere, and to compare it bit by bit.

A text is a function of the model's files, the arithmetic that computes them, and the request. A
receipt names all three, and holds the tokens with the logits that they were chosen by. `specrouter
verify` computes them again.
"""

import base64
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specrouter.request.params import RequestError, SamplingParams
from specrouter.request.spec import RequestSpec
from specrouter.request.structure import Structure

Words = NDArray[np.uint32]

_NOT_OF_THE_TEXT = frozenset({
    "n", "seed", "logprobs", "prompt_logprobs", "logits_processors", "prefix_cache", "cache_salt",
    "return_drafts", "receipt", "include_stop_str_in_output",
})  # fmt: skip
_DEFAULTS = SamplingParams()
# Settings of a member, and of the pool, that bits depend on.
OF_NUMBERS = ("dtype", "weights", "kv_dtype", "attention", "inflate_to", "revision")
OF_THE_POOL = ("attention", "pack_weights")


class ServedModel(BaseModel):
    """The model and arithmetic that a text was computed with.

    Attributes:
        specrouter: its version.
        source: as in the pool's configuration.
        settings: those in `OF_NUMBERS` and `OF_THE_POOL` that are not the defaults.
        files: SHA-256 of each, by name.
        arithmetic: other causes that the bits depend on, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    specrouter: str
    source: str
    settings: dict[str, Any]
    files: dict[str, str]
    arithmetic: tuple[str, ...]


class Receipt(BaseModel):
    """The receipt of one text.

    Attributes:
        params: sampling parameters that are not the defaults, in JSON.
        sample: number among the prompt's samples, from 0.
        logits: logits of the chosen tokens, before any processing: base64 of little-endian float32.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    served: ServedModel
    prompt_token_ids: tuple[int, ...] = Field(min_length=1)
    params: dict[str, Any]
    seed: int
    sample: int = 0
    token_ids: tuple[int, ...] = Field(min_length=1)
    finish_reason: str
    logits: str

    @classmethod
    def read(cls, text: str) -> "Receipt":
        """Read a receipt from JSON. Raises `RequestError`, which names the field."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            place = ".".join(map(str, ("receipt", *fault["loc"])))
            raise RequestError(place, fault["msg"]) from None

    def sampling(self) -> SamplingParams:
        """Return the parameters to compute the text again. Raises `RequestError`."""
        known = {field.name for field in fields(SamplingParams)} - _NOT_OF_THE_TEXT
        unknown = next((name for name in self.params if name not in known), None)
        if unknown is not None:
            raise RequestError(f"receipt.params.{unknown}", "is no parameter of a text")
        given = dict(self.params)
        try:
            if given.get("structure") is not None:
                given["structure"] = Structure(**given["structure"])
        except TypeError as error:
            raise RequestError("receipt.params.structure", str(error)) from error
        return SamplingParams(**given, seed=self.seed, receipt=True)


def receipt_of(
    served: ServedModel,
    spec: RequestSpec,
    token_ids: Sequence[int],
    logits: Sequence[float],
    finish_reason: str,
) -> Receipt:
    """Return the receipt of a text.

    `logits` are those of this attempt; a caller that knows earlier attempts adds theirs in front.
    """
    return Receipt(
        served=served,
        prompt_token_ids=spec.token_ids,
        params=_params(spec.params),
        seed=spec.seed,
        sample=spec.sample,
        token_ids=tuple(token_ids),
        finish_reason=finish_reason,
        logits=encoded_logits(logits),
    )


def encoded_logits(logits: Sequence[float]) -> str:
    return base64.b64encode(np.array(logits, dtype="<f4").tobytes()).decode()


def first_difference(receipt: Receipt, other: Receipt) -> str | None:
    """Describe the first difference of the second text; None: they are equal, to the bit."""
    pairs = zip(receipt.token_ids, other.token_ids, strict=False)
    for index, (token, own) in enumerate(pairs):
        if token != own:
            return f"token {index} is {own}, and was {token}"
    if len(receipt.token_ids) != len(other.token_ids):
        return f"there are {len(other.token_ids)} tokens, and were {len(receipt.token_ids)}"
    if receipt.logits == other.logits:
        return None
    before, now = _bits(receipt), _bits(other)
    if len(before) != len(now):
        return f"the receipt has logits of {len(before)} tokens, not of {len(now)}"
    for index in np.flatnonzero(before != now).tolist():
        return f"the tokens are equal; the bits of logit {index} (of {len(now)}) are not"
    return None


def _bits(receipt: Receipt) -> Words:
    """Return the logits as bits. Raises `RequestError`."""
    try:
        return np.frombuffer(base64.b64decode(receipt.logits, validate=True), "<u4")
    except ValueError as error:
        raise RequestError("receipt.logits", str(error)) from error


def _params(params: SamplingParams) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(params)):
        value = getattr(params, name)
        if name not in _NOT_OF_THE_TEXT and value != getattr(_DEFAULTS, name):
            found[name] = vars(value) if isinstance(value, Structure) else value
    return found
