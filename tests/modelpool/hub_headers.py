"""Headers of weights, as huggingface_hub reads them from a repository."""

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub.utils import (  # type: ignore[attr-defined]
    SafetensorsFileMetadata,
    SafetensorsRepoMetadata,
    TensorInfo,
)


def repository_headers(tensors: Mapping[str, tuple[Any, Sequence[int]]]) -> SafetensorsRepoMetadata:
    """Of one file; `tensors` have a dtype, such as "BF16", and a shape."""
    named = {
        name: TensorInfo(dtype, list(shape), (0, 0)) for name, (dtype, shape) in tensors.items()
    }
    file = SafetensorsFileMetadata({}, named)
    return SafetensorsRepoMetadata(None, False, {}, {"model.safetensors": file})
