"""Types of numbers in request bodies, with their ranges."""

from typing import Annotated

from pydantic import Field

from specrouter.request.params import MAX_LOGPROBS, MAX_SAMPLES

MOST = 2**31 - 1  # of a whole number: beyond any model's length and vocabulary

Count = Annotated[int, Field(ge=0, le=MOST)]
Tokens = Annotated[int, Field(ge=1, le=MOST)]
TokenId = Annotated[int, Field(ge=0, le=MOST)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
