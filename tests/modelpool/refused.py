"""What a configuration is refused for: the field by its name, and the reason in one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from modelpool.errors import ConfigError


@contextmanager
def refused(field: str, reason: str = "", kind: type[ConfigError] = ConfigError) -> Iterator[None]:
    """What is done within it raises such an error. `reason`: a pattern."""
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.field == field
    assert re.search(reason, caught.value.reason), caught.value.reason
    assert "\n" not in caught.value.reason
