"""Processors run without gradients, as the executor runs them."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield
