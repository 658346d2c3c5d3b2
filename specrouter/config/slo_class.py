"""SloConfig: a class of objectives, by the name that requests ask for."""

from pydantic import Field, model_validator

from modelpool.errors import ConfigError
from specrouter.config.strict import Strict
from specrouter.request.objective import SLO
from specrouter.request.params import RequestError


class SloConfig(Strict):
    """A class of objectives, by the name that requests ask for. At least one must be given.

    Attributes:
        tpot_ms: mean time of an output token after the first, in milliseconds; above 0, like all.
        ttft_ms: from submission to the first token, in milliseconds.
        tpot_ratio: `tpot_ms` as so many times what a token takes when the target serves one request
            alone. Not together with `tpot_ms`.
        e2e_ms: end-to-end latency, from submission to the last token, in milliseconds.
    """

    tpot_ms: float | None = Field(default=None, strict=True)
    ttft_ms: float | None = Field(default=None, strict=True)
    tpot_ratio: float | None = Field(default=None, strict=True)
    e2e_ms: float | None = Field(default=None, strict=True)

    @model_validator(mode="after")
    def _is_an_slo(self) -> "SloConfig":
        try:
            self.slo()
        except RequestError as error:
            raise ConfigError(error.field.removeprefix("slo").lstrip("."), error.reason) from None
        return self

    def slo(self) -> SLO:
        return SLO(self.tpot_ms, self.ttft_ms, self.tpot_ratio, e2e_ms=self.e2e_ms)
