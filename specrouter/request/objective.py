"""Objectives: the speed that a caller asks for, and whether a request attained it.

Contract: an `SLO` is checked when it is made, and becomes an `Objective` in absolute milliseconds
when its request is accepted. All are recorded and judged. TPOT objectives, that of the current
stage where there are stages, change which trees are verified; TTFT and end-to-end objectives change
what is scheduled if admission uses them (`engine.admission`). A request without an objective is
best effort.
Pure: no clock, no state.
Sources: AdaServe (EuroSys '26), section 6.1, "Metrics", for TPOT; SpecRouter, section 6 ("P95
request latency < 5 s"), for the end-to-end latency; SLOs-Serve (arXiv 2504.08784), section 2.1, for
stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from specrouter.request.params import RequestError, check_int, is_finite

QUANTITIES = ("tpot_ms", "ttft_ms", "e2e_ms", "tpot_ratio")
# The treatment of a request whose objective will not be attained.
OnUnattainable = Literal["best_effort", "reject"]
STAGE_ENDS = ("until_tokens", "until_token")
BY_VALUE = "default"  # class of an objective that was given by its values alone
NO_OBJECTIVE = "none"  # class of requests without one
_MOST_TOKENS = 2**31 - 1  # bound of a stage's numbers, as over HTTP
# A TTFT of five times the prompt's own time leaves room for others; short prompts get two seconds.
_IMPLIED_MULTIPLE, _IMPLIED_FLOOR_MS = 5.0, 2000.0


@dataclass(frozen=True)
class Stage:
    """A part of an output with a TPOT of its own, such as thinking.

    It ends after so many output tokens, or with a token such as the end of thinking. The last stage
    ends with the output, and sets neither.

    Attributes:
        tpot_ms: mean time of its output tokens, in milliseconds; the request's first one excluded.
        until_tokens: length of the stage; in the first stage the request's first token counts too.
        until_token: id of the token that ends it, and belongs to it.
    """

    tpot_ms: float
    until_tokens: int | None = None
    until_token: int | None = None


@dataclass(frozen=True, kw_only=True)
class SLO:
    """The objective as a caller states it.

    Attributes:
        tpot_ms: mean time of an output token after the first, in milliseconds.
        ttft_ms: time from submission to the first token, in milliseconds.
        tpot_ratio: `tpot_ms` as a multiple of the measured baseline latency, that of one request
            alone on the target only (AdaServe, Table 2). Not together with `tpot_ms`.
        slo_class: class of the configuration that it is counted in; it brings no values.
        e2e_ms: end-to-end latency, from submission to the last token, in milliseconds.
        stages: stages of the output, in order; not together with `tpot_ms` or `tpot_ratio`.
        on_unattainable: `reject`: the request ends with an error, before its first token;
            `best_effort`: it is served without the objective.

    Raises:
        RequestError: names one of `QUANTITIES`, such as `slo.tpot_ms`, which must be a finite
            number above 0, a field of a stage, such as `slo.stages[0].until_tokens`, or `slo`, if
            it asks for nothing.
    """

    tpot_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ratio: float | None = None
    slo_class: str | None = None
    e2e_ms: float | None = None
    stages: tuple[Stage, ...] = ()
    on_unattainable: OnUnattainable = "best_effort"

    def __post_init__(self) -> None:
        given = [name for name in QUANTITIES if getattr(self, name) is not None]
        for name in given:
            check_positive(f"slo.{name}", getattr(self, name))
        if self.slo_class is not None and not isinstance(self.slo_class, str):
            raise RequestError("slo.slo_class", f"must be a name, not {self.slo_class!r}")
        if self.tpot_ms is not None and self.tpot_ratio is not None:
            raise RequestError("slo.tpot_ratio", "give either tpot_ms or tpot_ratio, not both")
        check_stages("slo.stages", self.stages)
        if self.stages:
            for name in ("tpot_ms", "tpot_ratio"):
                if name in given:
                    raise RequestError(f"slo.{name}", "give either stages or one TPOT, not both")
        if self.on_unattainable not in get_args(OnUnattainable):
            choices = " or ".join(get_args(OnUnattainable))
            reason = f"must be {choices}, not {self.on_unattainable!r}"
            raise RequestError("slo.on_unattainable", reason)
        if not (given or self.stages):
            raise RequestError("slo", f"must give one of {', '.join(QUANTITIES)}, stages")


SloLike = SLO | str | None  # a string is the name of a class


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective that a request is judged by, in milliseconds; None where nothing was asked.

    `slo_class` is the class by whose name it was asked for, None if by value. With `stages` there
    is no `tpot_ms`. `implied_ttft_ms` (`with_implied_ttft`) is used for scheduling, and not judged.
    """

    tpot_ms: float | None = None
    ttft_ms: float | None = None
    slo_class: str | None = None
    e2e_ms: float | None = None
    stages: tuple[Stage, ...] = ()
    on_unattainable: OnUnattainable = "best_effort"
    implied_ttft_ms: float | None = None

    def is_attained(self, ttft_ms: float | None, decode_ms: float, decoded_tokens: int) -> bool:
        """Return whether a request that ended by itself attained this, its stages aside.

        The time of decoding starts at the first token, so TTFT is no part of it, and must be at
        most `tpot_ms` for each token after the first. The end-to-end latency is the sum of both.

        Args:
            ttft_ms: None if there was no first token.
            decode_ms: time from the first token to the last one.
            decoded_tokens: tokens after the first one.
        """
        late = self.ttft_ms is not None and (ttft_ms is None or ttft_ms > self.ttft_ms)
        slow = self.tpot_ms is not None and decode_ms > self.tpot_ms * decoded_tokens
        total_ms = None if ttft_ms is None else ttft_ms + decode_ms
        long = self.e2e_ms is not None and (total_ms is None or total_ms > self.e2e_ms)
        return not (late or slow or long)


def with_implied_ttft(objective: Objective, prompt_ms: float) -> Objective:
    """Return the objective with a TTFT to schedule for, if only a TPOT is asked for.

    `prompt_ms`: time to read the prompt alone.
    """
    if objective.ttft_ms is not None or objective.e2e_ms is not None:
        return objective
    implied_ms = max(_IMPLIED_FLOOR_MS, _IMPLIED_MULTIPLE * prompt_ms)
    return replace(objective, implied_ttft_ms=implied_ms)


def resolve(
    slo: SloLike | Objective, classes: Mapping[str, SLO], baseline_tpot_ms: Callable[[], float]
) -> Objective | None:
    """Return the objective that `slo` stands for now.

    The baseline latency is asked for only if it matters. An `Objective` is returned as it is: it
    was resolved before, elsewhere.

    Raises:
        RequestError: an unknown class, or a ratio that the baseline makes 0 or infinite.
    """
    if isinstance(slo, Objective):
        return slo
    asked = _asked(slo, classes)
    if asked is None:
        return None
    tpot_ms = asked.tpot_ms
    if asked.tpot_ratio is not None:
        tpot_ms = float(asked.tpot_ratio) * baseline_tpot_ms()
        check_positive("slo.tpot_ratio", tpot_ms, "times the baseline latency ")
    return Objective(
        tpot_ms=_float(tpot_ms),
        ttft_ms=_float(asked.ttft_ms),
        slo_class=asked.slo_class,
        e2e_ms=_float(asked.e2e_ms),
        stages=asked.stages,
        on_unattainable=asked.on_unattainable,
    )


def joined(
    slo: SloLike,
    added: Mapping[str, float],
    classes: Mapping[str, SLO],
    spelling: Mapping[str, str],
) -> SloLike:
    """Return `slo` with the values of a second source, which may repeat it but not contradict it.

    Args:
        slo: the objective of the body.
        added: values by name: `tpot_ms`, `ttft_ms`, `e2e_ms`.
        classes: the classes of the configuration.
        spelling: names of these values there, such as the names of headers; with `slo_class`, if
            that is not `slo`.

    Raises:
        RequestError: names a header or an option that is no positive number, or that contradicts
            `slo`; `tpot_ms` contradicts any `tpot_ratio`. Names `slo`, or the spelling of
            `slo_class`, for an unknown class.
    """
    for name, value in added.items():
        check_positive(spelling[name], value)
    asked = _asked(slo, classes, spelling.get("slo_class", "slo"))
    if not added:
        return slo
    values: dict[str, Any] = {} if asked is None else dict(vars(asked))
    for name, value in added.items():
        present = values.get(name)
        ratio = values.get("tpot_ratio")
        if name == "tpot_ms" and ratio is not None:
            raise RequestError(spelling[name], f"slo gives a tpot_ratio already, {ratio}")
        if name == "tpot_ms" and values.get("stages"):
            raise RequestError(spelling[name], "slo gives stages already")
        if present is not None and present != value:
            raise RequestError(spelling[name], f"is {value}, and slo gives {name} {present}")
    return SLO(**{**values, **added})


def check_positive(field: str, value: object, what: str = "") -> None:
    """Raise `RequestError` for `field` unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(field, f"{what}must be a number, not {value!r}")
    finite = is_finite(value)
    if not finite or value <= 0:
        shown = value if finite or isinstance(value, float) else "such a large number"
        raise RequestError(field, f"{what}must be finite and above 0, not {shown}")


def check_stages(field: str, stages: object) -> None:
    """Raise `RequestError` for the field of a stage, such as `field[0].tpot_ms`."""
    if not isinstance(stages, tuple):
        raise RequestError(field, f"must be a tuple of stages, not {stages!r}")
    for place, stage in enumerate(stages):
        name, is_last = f"{field}[{place}]", place == len(stages) - 1
        if not isinstance(stage, Stage):
            raise RequestError(name, f"must be a Stage, not {stage!r}")
        check_positive(f"{name}.tpot_ms", stage.tpot_ms)
        given = [each for each in STAGE_ENDS if getattr(stage, each) is not None]
        for each in given:
            least = 1 if each == "until_tokens" else 0
            check_int(f"{name}.{each}", getattr(stage, each), least, _MOST_TOKENS)
        if len(given) > 1:
            raise RequestError(f"{name}.until_token", "give either until_tokens or until_token")
        if is_last and given:
            raise RequestError(f"{name}.{given[0]}", "the last stage ends with the output")
        if not is_last and not given:
            raise RequestError(name, "must say where it ends: until_tokens or until_token")


def _asked(slo: object, classes: Mapping[str, SLO], field: str = "slo") -> SLO | None:
    """Return the SLO with the values of its class, if it names one."""
    if slo is None:
        return None
    if not isinstance(slo, SLO | str):
        raise RequestError("slo", f"must be an SLO or the name of a class, not {slo!r}")
    name = slo if isinstance(slo, str) else slo.slo_class
    if name is not None and name not in classes:
        known = f"the known ones are {', '.join(classes)}" if classes else "there are none"
        raise RequestError(field, f"{name[:40]!r} is no class of slo_classes; {known}")
    return replace(classes[slo], slo_class=slo) if isinstance(slo, str) else slo


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def check_vocabulary(stages: Sequence[Stage], vocabulary: int) -> None:
    """Raise `RequestError` for a stage's end token that is not below the vocabulary's size."""
    for place, stage in enumerate(stages):
        if stage.until_token is not None and stage.until_token >= vocabulary:
            field = f"slo.stages[{place}].until_token"
            raise RequestError(field, f"must be below {vocabulary}, not {stage.until_token}")
