"""What a caller asks of a request's speed, and whether it was given.

Contract: an `SLO` is checked when it is made, and becomes an `Objective` in absolute milliseconds
when its request is accepted. TPOT, TTFT and end-to-end objectives are recorded and judged; so far
only TPOT objectives change what is scheduled. A request without an objective is throughput traffic.
Pure: no clock, no state.
Sources: AdaServe (EuroSys '26), section 6.1, "Metrics", for TPOT; SpecRouter, section 6 ("P95
request latency < 5 s"), for the end-to-end latency.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from specrouter.request.params import RequestError

QUANTITIES = ("tpot_ms", "ttft_ms", "e2e_ms", "tpot_ratio")
BY_VALUE = "default"  # class of an objective that was given by its values alone
NO_OBJECTIVE = "none"  # class of requests without one
RUN_TOKENS = 10  # over so many tokens TPOT is reported along a request


@dataclass(frozen=True)
class SLO:
    """What a caller asks.

    Attributes:
        tpot_ms: mean time of an output token after the first, in milliseconds.
        ttft_ms: from submission to the first token, in milliseconds.
        tpot_ratio: `tpot_ms` as so many times the measured baseline latency, that of one request
            alone on the target only (AdaServe, Table 2). Not together with `tpot_ms`.
        slo_class: under which class of the configuration it is counted; it brings no values.
        e2e_ms: end-to-end latency, from submission to the last token, in milliseconds.

    Raises:
        RequestError: names one of `QUANTITIES`, such as `slo.tpot_ms`, which must be a finite
            number above 0, or `slo`, if there is none of them.
    """

    tpot_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ratio: float | None = None
    slo_class: str | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in QUANTITIES if getattr(self, name) is not None]
        for name in given:
            check_positive(f"slo.{name}", getattr(self, name))
        if self.tpot_ms is not None and self.tpot_ratio is not None:
            raise RequestError("slo.tpot_ratio", "give either tpot_ms or tpot_ratio, not both")
        if not given:
            raise RequestError("slo", f"must give one of {', '.join(QUANTITIES)}")


SloLike = SLO | str | None  # a string is the name of a class


@dataclass(frozen=True)
class Objective:
    """What a request is judged by, in milliseconds; None where nothing was asked.

    `slo_class` is the class by whose name it was asked for, None if by value.
    """

    tpot_ms: float | None
    ttft_ms: float | None
    slo_class: str | None = None
    e2e_ms: float | None = None

    def is_attained(self, ttft_ms: float | None, decode_ms: float, decoded_tokens: int) -> bool:
        """Of a request that ended by itself.

        The time of decoding starts at the first token, so TTFT is no part of it, and must be at
        most `tpot_ms` for each token after the first. The end-to-end latency is the sum of both.

        Args:
            ttft_ms: None where there was no first token.
            decode_ms: from the first token to the last one.
            decoded_tokens: after the first one.
        """
        late = self.ttft_ms is not None and (ttft_ms is None or ttft_ms > self.ttft_ms)
        slow = self.tpot_ms is not None and decode_ms > self.tpot_ms * decoded_tokens
        total_ms = None if ttft_ms is None else ttft_ms + decode_ms
        long = self.e2e_ms is not None and (total_ms is None or total_ms > self.e2e_ms)
        return not (late or slow or long)


def resolve(
    slo: SloLike, classes: Mapping[str, SLO], baseline_tpot_ms: Callable[[], float]
) -> Objective | None:
    """What `slo` means now; the baseline latency is asked for only where it matters.

    Raises:
        RequestError: an unknown class, or a ratio that the baseline makes 0 or infinite.
    """
    asked = _asked(slo, classes)
    if asked is None:
        return None
    tpot_ms = asked.tpot_ms
    if asked.tpot_ratio is not None:
        tpot_ms = float(asked.tpot_ratio) * baseline_tpot_ms()
        check_positive("slo.tpot_ratio", tpot_ms, "times the baseline latency ")
    return Objective(_float(tpot_ms), _float(asked.ttft_ms), asked.slo_class, _float(asked.e2e_ms))


def joined(
    slo: SloLike,
    added: Mapping[str, float],
    classes: Mapping[str, SLO],
    spelling: Mapping[str, str],
) -> SloLike:
    """`slo` with what a second way in adds to it, which may repeat it but not contradict it.

    Args:
        added: values by name: `tpot_ms`, `ttft_ms`, `e2e_ms`.
        spelling: what these are called there, such as the names of headers.

    Raises:
        RequestError: names a header or an option that is no positive number, or that gives what
            `slo` gives otherwise; `tpot_ms` contradicts a `tpot_ratio` whatever its value. Names
            `slo` for an unknown class.
    """
    for name, value in added.items():
        check_positive(spelling[name], value)
    asked = _asked(slo, classes)
    if not added:
        return slo
    values: dict[str, Any] = {} if asked is None else asdict(asked)
    for name, value in added.items():
        present = values.get(name)
        ratio = values.get("tpot_ratio")
        if name == "tpot_ms" and ratio is not None:
            raise RequestError(spelling[name], f"slo gives a tpot_ratio already, {ratio}")
        if present is not None and present != value:
            raise RequestError(spelling[name], f"is {value}, and slo gives {name} {present}")
    return SLO(**{**values, **added})


def tpot_of_runs(commits: Sequence[tuple[float, int]], tokens: int = RUN_TOKENS) -> list[float]:
    """Mean time of a token, in milliseconds, over every full run of `tokens` after the first token.

    Tokens of one commit share the time since the one before it evenly.

    Args:
        commits: when tokens came, in seconds, and how many; at least 1 each.
    """
    counts = np.cumsum([count for _, count in commits])
    if not len(counts):
        return []
    came_s = [commits[0][0], *(came_s for came_s, _ in commits)]
    ends = np.arange(1, counts[-1] + 1, tokens)
    ends_s = np.interp(ends, [1, *counts], came_s)
    return [float(each) for each in np.diff(ends_s) * (1000 / tokens)]


def check_positive(field: str, value: object, what: str = "") -> None:
    """Raises `RequestError` for `field` unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(field, f"{what}must be a number, not {value!r}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        finite = False
    if not finite or value <= 0:
        shown = value if finite or isinstance(value, float) else "such a large number"
        raise RequestError(field, f"{what}must be finite and above 0, not {shown}")


def _asked(slo: object, classes: Mapping[str, SLO]) -> SLO | None:
    """With the values of its class, if it is one."""
    if slo is None:
        return None
    if not isinstance(slo, SLO | str):
        raise RequestError("slo", f"must be an SLO or the name of a class, not {slo!r}")
    name = slo if isinstance(slo, str) else slo.slo_class
    if name is not None and name not in classes:
        known = f"the known ones are {', '.join(classes)}" if classes else "there are none"
        raise RequestError("slo", f"{name[:40]!r} is no class of slo_classes; {known}")
    return replace(classes[slo], slo_class=slo) if isinstance(slo, str) else slo


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)
