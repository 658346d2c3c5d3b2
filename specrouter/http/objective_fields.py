"""Fields and headers of a request that give its latency objective.

Contract: an objective may come in the body (`slo`), in headers (`x-slo-tpot-ms`, `x-slo-ttft-ms`,
`x-slo-e2e-ms`), or in both: headers add to the body's, and must not contradict it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from starlette.datastructures import Headers

from specrouter.request.objective import SLO, SloLike, joined
from specrouter.request.params import RequestError
from specrouter.request.slo_fields import SloFields, TokenIdOf

SLO_HEADERS = {"tpot_ms": "x-slo-tpot-ms", "ttft_ms": "x-slo-ttft-ms", "e2e_ms": "x-slo-e2e-ms"}


def asked_objective(
    asked: str | SloFields | None,
    headers: Headers,
    classes: Mapping[str, SLO],
    token_id_of: TokenIdOf,
) -> SloLike:
    """Return the objective that the body's `slo` and the headers ask for together.

    Raises:
        RequestError: names a field or a header that is no positive number, a header that
            contradicts the body, or a stage whose end is not a single token.
    """
    added = {
        name: _number_of(headers, header)
        for name, header in SLO_HEADERS.items()
        if header in headers
    }
    if asked is None and not added:
        return None
    if isinstance(asked, SloFields) and added and asked.is_empty:
        slo = joined(None, added, classes, SLO_HEADERS)
        assert isinstance(slo, SLO), "headers give values"
        return replace(slo, on_unattainable=asked.on_unattainable or "best_effort")
    slo = asked.slo(token_id_of) if isinstance(asked, SloFields) else asked
    return joined(slo, added, classes, SLO_HEADERS)


def _number_of(headers: Headers, name: str) -> float:
    given = headers.getlist(name)
    if len(given) > 1:
        raise RequestError(name, "is given more than once")
    try:
        if "_" in given[0]:  # Python would accept 1_000
            raise ValueError
        return float(given[0])
    except ValueError:
        raise RequestError(name, f"must be a number, not {given[0][:40]!r}") from None
