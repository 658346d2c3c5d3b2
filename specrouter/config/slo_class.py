"""SloConfig: a named class of objectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import model_validator

from modelpool.errors import ConfigError
from specrouter.request.objective import SLO, check_vocabulary
from specrouter.request.params import RequestError
from specrouter.request.slo_fields import SloFields, single_token

if TYPE_CHECKING:  # it takes seconds to import, and files are checked before that
    from transformers import PreTrainedTokenizerBase


class SloConfig(SloFields):
    """A class of objectives, which requests ask for by name. At least one objective is required."""

    @model_validator(mode="after")
    def _is_an_slo(self) -> SloConfig:
        try:
            self.slo(_any_token)
        except RequestError as error:
            raise ConfigError(_place(error), error.reason) from None
        return self


def slos_by_class(
    classes: Mapping[str, SloConfig], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, SLO]:
    """Return the objective of each class.

    Without a tokenizer, the ends of stages are not checked. Raises `ConfigError` if one of them is
    not a single token of the tokenizer.
    """
    token_id_of, slos = _any_token if tokenizer is None else single_token(tokenizer), {}
    for name, one in classes.items():
        try:
            slos[name] = one.slo(token_id_of)
            if tokenizer is not None:
                check_vocabulary(slos[name].stages, len(tokenizer))
        except RequestError as error:
            raise ConfigError(f"slo_classes.{name}.{_place(error)}", error.reason) from None
    return slos


def _place(error: RequestError) -> str:
    return error.field.removeprefix("slo").lstrip(".")


def _any_token(field: str, text: str) -> int:
    """Stand in for a tokenizer that is not loaded yet."""
    return 0
