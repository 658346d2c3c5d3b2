"""What a caller asks for: sampling parameters, an override of speculation, and their refusals."""

import math
from dataclasses import dataclass


class RequestError(ValueError):
    """A request that cannot be served as it stands. Raised before anything is queued."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


_LEAST_TEMPERATURE = 1e-6  # below it, quotients overflow and the text is greedy anyway
MAX_DEPTH = 16  # draft tokens; beyond it the chance that all are accepted is negligible


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when a text ends. The defaults are greedy.

    Attributes:
        max_new_tokens: at least 1.
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1.0 is off.
        seed: 0 .. 2**64 - 1; None draws one, which the output returns.
        stop: texts that end the output; they are not part of it.
        stop_token_ids: ids that end the output; they are part of it.
        ignore_eos: go on after the model's end-of-text id.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        _check_int("max_new_tokens", self.max_new_tokens, least=1)
        _check_number("temperature", self.temperature, least=0.0)
        if 0.0 < self.temperature < _LEAST_TEMPERATURE:
            raise RequestError("temperature", f"must be 0 or at least {_LEAST_TEMPERATURE:g}")
        _check_int("top_k", self.top_k, least=0)
        _check_number("top_p", self.top_p, least=0.0)
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError("top_p", f"must be above 0 and at most 1, not {self.top_p}")
        if self.seed is not None:
            _check_int("seed", self.seed, least=0)
            if self.seed >= 2**64:
                raise RequestError("seed", "must be below 2**64")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError("stop", "must hold texts that are not empty")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, least=0)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("ignore_eos", "must be true or false")


@dataclass(frozen=True)
class Speculation:
    """An override of the scheduler for one request.

    Attributes:
        chain: models from the drafter to the target; None leaves it to the scheduler. The target
            alone means no speculation.
        depth: draft tokens a cycle, 1 .. MAX_DEPTH; None takes the configured one.
    """

    chain: tuple[str, ...] | None = None
    depth: int | None = None

    def __post_init__(self) -> None:
        if self.chain is not None:
            chain = _tuple("speculation.chain", self.chain)
            object.__setattr__(self, "chain", chain)
            if not chain or not all(isinstance(name, str) for name in chain):
                raise RequestError("speculation.chain", "must name the models of a chain")
        if self.depth is not None:
            _check_int("speculation.depth", self.depth, least=1)
            if self.depth > MAX_DEPTH:
                raise RequestError("speculation.depth", f"must be at most {MAX_DEPTH}")

    def check_members(self, names: tuple[str, ...], target: str) -> None:
        """Raises `RequestError` unless the chain is one of this pool."""
        chain = self.chain
        if chain is None:
            return
        field = "speculation.chain"
        for name in chain:
            if name not in names:
                known = ", ".join(names)
                raise RequestError(field, f"{name!r} is not in the pool ({known})")
        if chain[-1] != target:
            raise RequestError(field, f"must end in the target {target!r}, not {chain[-1]!r}")
        if len(set(chain)) != len(chain):
            raise RequestError(field, "names a model twice")


def _tuple(field: str, value: object) -> tuple[object, ...]:
    if isinstance(value, str):
        return (value,)
    try:
        return tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(field, f"must be a list, not {type(value).__name__}") from None


def _check_int(field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(field, f"must be a whole number, not {value!r}")
    if value < least:
        raise RequestError(field, f"must be at least {least}, not {value}")


def _check_number(field: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(field, f"must be a number, not {value!r}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        finite = False
    if not finite:
        raise RequestError(field, f"must be finite, not {value}")
    if value < least:
        raise RequestError(field, f"must be at least {least:g}, not {value}")
