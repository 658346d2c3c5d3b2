"""KVMemory: memory for the keys and values of all models, as a configuration states it."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from modelpool.errors import ConfigError

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B|B)")
_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000 ** (power + 1) for power, letter in enumerate("KMGT")},
    **{f"{letter}iB": 1024 ** (power + 1) for power, letter in enumerate("KMGT")},
}
_FORMS = 'a share of the device between 0 and 1, or an amount such as "8GiB" or "40%"'


@dataclass(frozen=True)
class KVMemory:
    """Memory for keys and values: `share` of all memory of the target's device, or `bytes`.

    Attributes:
        block: tokens; as many as fit are taken in whole blocks.
        field: its place in the configuration.
        bounds: returns for the longest sequence the least and the most tokens, which hold for any
            room.
    """

    block: int
    field: str
    share: float | None = None
    bytes: int | None = None
    bounds: Callable[[int], tuple[int, int]] | None = None

    @classmethod
    def of(cls, value: float | str, block: int, field: str) -> "KVMemory":
        """Parse a value of the configuration; raise `ValueError` for an invalid one."""
        if isinstance(value, str):
            found = _AMOUNT.fullmatch(value.strip())
            if found is None:
                raise ValueError(f"must be {_FORMS}, not {value!r}")
            number, unit = float(found[1]), found[2]
            if unit != "%":
                if not number:
                    raise ValueError("must be more than nothing")
                return cls(block, field, bytes=int(number * _UNITS[unit]))
            value = number / 100
        if isinstance(value, bool) or not 0.0 < value <= 1.0:
            raise ValueError(f"must be {_FORMS}, not {value!r}")
        return cls(block, field, share=float(value))

    def tokens(self, bytes_per_token: int, device_bytes: int, longest: int = 0) -> int:
        """Return the tokens of each model's store.

        Raises `ConfigError` if there is no room for a block.

        Args:
            bytes_per_token: KV bytes of all models together.
            device_bytes: all memory of the target's device.
            longest: tokens of a sequence at which all models can be used.
        """
        room = self.bytes if self.share is None else int(self.share * device_bytes)
        assert room is not None
        tokens = room // max(bytes_per_token, 1) // self.block * self.block
        if self.bounds is not None:
            least, most = self.bounds(longest)
            return max(least, min(tokens, most))
        if tokens < self.block:
            least = math.ceil(self.block * bytes_per_token / 1024)
            reason = f"{self.block} tokens alone take {least} KiB in all models together"
            raise ConfigError(self.field, reason)
        return tokens
