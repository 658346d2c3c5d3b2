"""Facts that a GGUF file states about its model, by their names after the architecture's."""

from dataclasses import dataclass
from typing import Any

from modelpool.errors import ConfigError
from modelpool.gguf.header import GgufHeader


@dataclass(frozen=True)
class Facts:
    """Facts of a model.

    The methods raise `ConfigError` if a fact is missing without a default, or is not a number of
    the right kind.
    """

    header: GgufHeader
    architecture: str

    def size(self, name: str, default: int | None = None) -> int:
        """Return a number of at least 1."""
        found = self.header.fact(f"{self.architecture}.{name}", int, default)
        if not 0 < found < 2**31:
            raise self.error(name, f"is {found}")
        return found

    def count(self, name: str) -> int:
        """Return a number, 0 if it is missing."""
        return self.size(name) if self._value(name) else 0

    def number(self, name: str, default: float | None = None) -> float:
        return self.header.fact(f"{self.architecture}.{name}", float, default)

    def text(self, name: str, default: str) -> str:
        return self.header.fact(f"{self.architecture}.{name}", str, default)

    def flag(self, name: str, default: bool) -> bool:
        return self.header.fact(f"{self.architecture}.{name}", bool, default)

    def of_layers(self, name: str, layers: int, default: int | None = None) -> list[int]:
        """Return a number for each layer, which may be one for all; several may include 0."""
        if not isinstance(self._value(name), list):
            return [self.size(name, default)] * layers
        found = self.header.fact(f"{self.architecture}.{name}", list)[:layers]
        are_numbers = all(isinstance(one, int) and 0 <= one < 2**31 for one in found)
        if len(found) < layers or not are_numbers:
            raise self.error(name, "has not a number for each layer")
        return found

    def windows(self, layers: int, period: int) -> list[str]:
        """Return the types of the layers.

        `period`: every so many layers one has no window, if the file does not say.
        """
        name, kinds = "attention.sliding_window_pattern", ("full_attention", "sliding_attention")
        if isinstance(self._value(name), list):
            return [kinds[bool(one)] for one in self.of_layers(name, layers)]
        period = self.size(name, period)
        return [kinds[(layer + 1) % period != 0] for layer in range(layers)]

    def error(self, name: str, reason: str) -> ConfigError:
        return self.header.error(f"{self.architecture}.{name} {reason}")

    def _value(self, name: str) -> Any:
        return self.header.facts.get(f"{self.architecture}.{name}")
