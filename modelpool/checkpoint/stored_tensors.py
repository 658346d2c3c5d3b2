"""StoredTensors: a checkpoint's tensors by name, each read on access."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from modelpool.checkpoint.headers import weight_files


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of the files that transformers would load.

    Raises `ConfigError` for an invalid index, and what safetensors raises.
    """

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Path] = {}
        for file in weight_files(directory):
            self._files |= dict.fromkeys(_opened(file).keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = _opened(self._files[name]).get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> list[int]:
        return list(_opened(self._files[name]).get_slice(name).get_shape())


def _opened(file: Path) -> Any:
    """Open a file until the result is released.

    A file that stays open keeps all that was read from it in memory.
    """
    return safe_open(file, framework="pt")
