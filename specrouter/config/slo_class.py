"""SloConfig: a class of objectives, by the name that requests ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field, StrictInt, StrictStr, model_validator

from modelpool.errors import ConfigError
from specrouter.config.strict import Strict
from specrouter.request.objective import (
    QUANTITIES,
    SLO,
    OnUnattainable,
    TokenIdOf,
    check_vocabulary,
    single_token,
    stages_of,
)
from specrouter.request.params import RequestError

if TYPE_CHECKING:  # a file is checked before what takes seconds to import
    from transformers import PreTrainedTokenizerBase


class StageConfig(Strict):
    """A part of an output with a TPOT of its own. The last stage ends with the output; all others
    must say where they end.

    Attributes:
        tpot_ms: mean time of its tokens, in milliseconds, the request's first token excluded.
        until_tokens: it has so many tokens.
        until_token: it ends with this token: an id, or the text of a single token, such as
            `</think>`.
    """

    tpot_ms: float = Field(strict=True)
    until_tokens: int | None = Field(default=None, ge=1, strict=True)
    until_token: StrictInt | StrictStr | None = None


class SloConfig(Strict):
    """A class of objectives, by the name that requests ask for. At least one must be given.

    Attributes:
        tpot_ms: mean time of an output token after the first, in milliseconds; above 0, like all.
        ttft_ms: from submission to the first token, in milliseconds.
        tpot_ratio: TPOT as a multiple of the target's own for a single request; excludes `tpot_ms`.
        e2e_ms: from submission to the last token, in milliseconds.
        stages: parts of the output in order, such as thinking and answer; excludes `tpot_ms` and
            `tpot_ratio`.
        on_unattainable: what a request gets whose objective cannot be attained: 503 (`reject`), or
            service without it (`best_effort`).
    """

    tpot_ms: float | None = Field(default=None, strict=True)
    ttft_ms: float | None = Field(default=None, strict=True)
    tpot_ratio: float | None = Field(default=None, strict=True)
    e2e_ms: float | None = Field(default=None, strict=True)
    stages: tuple[StageConfig, ...] = ()
    on_unattainable: OnUnattainable = "best_effort"

    @model_validator(mode="after")
    def _is_an_slo(self) -> SloConfig:
        try:
            self.slo(_any_token)
        except RequestError as error:
            raise ConfigError(_place(error), error.reason) from None
        return self

    def slo(self, token_id_of: TokenIdOf) -> SLO:
        """Raises `RequestError`."""
        stages = [(one.tpot_ms, one.until_tokens, one.until_token) for one in self.stages]
        return SLO(
            **{name: getattr(self, name) for name in QUANTITIES},
            stages=stages_of(stages, token_id_of),
            on_unattainable=self.on_unattainable,
        )


def slos_by_class(
    classes: Mapping[str, SloConfig], tokenizer: PreTrainedTokenizerBase
) -> dict[str, SLO]:
    """Raises `ConfigError` where a stage's end is no token of the tokenizer."""
    token_id_of, slos = single_token(tokenizer), {}
    for name, one in classes.items():
        try:
            slos[name] = one.slo(token_id_of)
            check_vocabulary(slos[name].stages, len(tokenizer))
        except RequestError as error:
            raise ConfigError(f"slo_classes.{name}.{_place(error)}", error.reason) from None
    return slos


def _place(error: RequestError) -> str:
    return error.field.removeprefix("slo").lstrip(".")


def _any_token(field: str, text: str) -> int:
    """While there is no tokenizer yet."""
    return 0
