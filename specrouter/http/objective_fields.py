"""The fields and headers that say how fast a request is to be served.

Contract: an objective may come in the body (`slo`), in headers (`x-slo-tpot-ms`, `x-slo-ttft-ms`,
`x-slo-e2e-ms`), or in both: headers add to the body's, and must not contradict it. Types and ranges
are checked here, so that the API's schema shows them; the rest by `SLO`. These fields are our own,
so an unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from starlette.datastructures import Headers

from specrouter.request.fields import OwnFields, Positive, Text, TokenId, Tokens
from specrouter.request.objective import (
    QUANTITIES,
    SLO,
    OnUnattainable,
    SloLike,
    TokenIdOf,
    joined,
    stages_of,
)
from specrouter.request.params import RequestError

SLO_HEADERS = {"tpot_ms": "x-slo-tpot-ms", "ttft_ms": "x-slo-ttft-ms", "e2e_ms": "x-slo-e2e-ms"}
MAX_STAGES = 64
MAX_TOKEN_CHARACTERS = 256


class StageRequest(OwnFields):
    """A part of the output with a TPOT of its own. All but the last say where they end."""

    tpot_ms: Positive
    """Mean time of its output tokens, in milliseconds; the first token of the output excluded."""
    until_tokens: Tokens | None = None
    """It has so many tokens."""
    until_token: TokenId | Annotated[Text, Field(max_length=MAX_TOKEN_CHARACTERS)] | None = None
    """It ends with this token: an id, or the text of a single token, such as `</think>`."""


class SloRequest(OwnFields):
    """An objective by value; what is null is not asked for."""

    tpot_ms: Positive | None = None
    """Mean time of an output token after the first, in milliseconds."""
    ttft_ms: Positive | None = None
    """Time from submission to the first token, in milliseconds."""
    e2e_ms: Positive | None = None
    """Time from submission to the last token, in milliseconds."""
    tpot_ratio: Positive | None = None
    """`tpot_ms` as a multiple of what a token takes when the target serves one request alone."""
    stages: Annotated[list[StageRequest], Field(min_length=1, max_length=MAX_STAGES)] | None = None
    """Parts of the output, in their order, each with its own TPOT; instead of `tpot_ms`."""
    on_unattainable: OnUnattainable | None = None
    """If it cannot be attained: `reject` answers 503 with what can be; `best_effort`, the default,
    serves the request without it."""

    @property
    def is_empty(self) -> bool:
        """Whether it says at most what becomes of an objective that comes another way."""
        return all(getattr(self, name) is None for name in (*QUANTITIES, "stages"))

    def slo(self, token_id_of: TokenIdOf) -> SLO:
        """Raises `RequestError`."""
        stages = [(one.tpot_ms, one.until_tokens, one.until_token) for one in self.stages or ()]
        return SLO(
            **{name: getattr(self, name) for name in QUANTITIES},
            stages=stages_of(stages, token_id_of),
            on_unattainable=self.on_unattainable or "best_effort",
        )


def asked_objective(
    asked: str | SloRequest | None,
    headers: Headers,
    classes: Mapping[str, SLO],
    token_id_of: TokenIdOf,
) -> SloLike:
    """What the body's `slo` and the headers ask for together.

    Raises:
        RequestError: names the field or the header that is no positive number, the header that
            contradicts the body, and the stage whose end is no token.
    """
    added = {
        name: _number_of(headers, header)
        for name, header in SLO_HEADERS.items()
        if header in headers
    }
    if asked is None and not added:
        return None
    if isinstance(asked, SloRequest) and added and asked.is_empty:
        slo = joined(None, added, classes, SLO_HEADERS)
        assert isinstance(slo, SLO), "headers give values"
        return replace(slo, on_unattainable=asked.on_unattainable or "best_effort")
    slo = asked.slo(token_id_of) if isinstance(asked, SloRequest) else asked
    return joined(slo, added, classes, SLO_HEADERS)


def _number_of(headers: Headers, name: str) -> float:
    given = headers.getlist(name)
    if len(given) > 1:
        raise RequestError(name, "is given more than once")
    try:
        if "_" in given[0]:  # Python would read 1_000
            raise ValueError
        return float(given[0])
    except ValueError:
        raise RequestError(name, f"must be a number, not {given[0][:40]!r}") from None
