"""Header of a GGUF file: its facts, and the place of each tensor.

Contract: nothing in the file is trusted before it fits the file's size, and no weights are read: a
count, a length or an offset beyond it is an error that names the field, before anything of that
size is allocated.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import difflib
import importlib.util
import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from modelpool.checkpoint.cache_dir import expanded
from modelpool.errors import ConfigError

ENDING = ".gguf"
_Value = TypeVar("_Value", str, int, float, bool, list[Any])

_MAGIC, _VERSIONS, _BIG_ENDIAN = b"GGUF", (2, 3), 2**16
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LEAST_FACT, _LEAST_TENSOR = 13, 32  # bytes
_DIMENSIONS, _MOST_ELEMENTS, _MOST_ITEMS = 4, 2**48, 2**22
_ALIGNMENT = "general.alignment"
_FIRST_PART = re.compile(r"(.*)-00001-of-(\d{5})" + re.escape(ENDING))
_MOST_SHOWN = 8  # files in the folder of a missing one
# Name, values of a block and bytes of a block, by their numbers in the file.
_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor of a GGUF file.

    `shape` is [out, in], in reverse of the order in the file; `start` is its offset in the file.
    """

    file: Path
    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "GgufTensor":
        """Return a tensor from its fields in JSON."""
        shape = tuple(stored["shape"])
        return cls(**{**stored, "file": Path(stored["file"]), "shape": shape})


@dataclass(frozen=True)
class GgufHeader:
    file: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def fact(self, name: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        """Return a fact, or the default.

        Raises `ConfigError` if both are missing, or if the fact is of another kind.
        """
        found = self.facts.get(name, default)
        if found is None:
            raise self.error(f"has no {name}")
        if kind is float and type(found) is int:
            found = float(found)
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise self.error(f"{name} is no {kind.__name__}")
        if isinstance(found, float) and not math.isfinite(found):
            raise self.error(f"{name} is {found}")
        return found

    def error(self, reason: str) -> ConfigError:
        return _error(self.file, reason)


def is_gguf(source: str) -> bool:
    is_path = source.endswith(ENDING) and not source.startswith("hub:")
    return source.startswith("gguf:") or is_path


def path_of(source: str) -> Path:
    """Return the file of `gguf:PATH`, or of a path.

    Raises `ConfigError` if the package `gguf` is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("", "GGUF files need the package gguf: pip install 'specrouter[gguf]'")
    # Links are not resolved: parts lie beside each other by their names, as in the hub's cache.
    return expanded(source.removeprefix("gguf:").removeprefix("path:")).absolute()


def parts_of(first: Path) -> tuple[Path, ...]:
    """Return the file, or all parts of a split one, whose first it is by its name."""
    name = _FIRST_PART.fullmatch(first.name)
    if name is None or not int(name[2]):
        return (first,)
    stem, parts = name.groups()
    return tuple(
        first.with_name(f"{stem}-{number:05d}-of-{parts}{ENDING}")
        for number in range(1, int(parts) + 1)
    )


def read_header(first: Path) -> GgufHeader:
    """Read the header of a file, or of all parts of a split one, whose first it is.

    Raises `ConfigError`.
    """
    header = _read(first)
    parts = header.fact("split.count", int, 1)
    if parts <= 1:
        return header
    files, ending = parts_of(first), f"-00001-of-{parts:05d}{ENDING}"
    if header.fact("split.no", int) != 0 or len(files) != parts:
        raise header.error(f"is one of {parts} parts: give the first, which ends in {ending!r}")
    tensors = dict(header.tensors)
    for number, file in enumerate(files[1:], start=1):
        if not file.is_file():
            raise header.error(f"is one of {parts} parts, and {file.name!r} is not beside it")
        part = _read(file)
        if (part.fact("split.no", int), part.fact("split.count", int)) != (number, parts):
            raise part.error(f"split.no or split.count is not that of part {number + 1} of {parts}")
        for name in part.tensors:
            if name in tensors:
                raise part.error(f"tensor {name!r} stands in two parts")
        tensors |= part.tensors
    wanted = header.fact("split.tensors.count", int, len(tensors))
    if wanted != len(tensors):
        raise header.error(f"split.tensors.count is {wanted}, and there are {len(tensors)}")
    return GgufHeader(first, header.facts, tensors)


def _read(file: Path) -> GgufHeader:
    try:
        with file.open("rb") as stream:
            if not file.stat().st_size:
                raise _error(file, "is empty")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(file, data).header()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _error(file, f"no such file; {_beside(file)}") from error
    except OSError as error:
        raise _error(file, f"cannot be read: {error.strerror}") from error


def _beside(file: Path) -> str:
    """Return a hint for a missing file: files beside it, the most similar names first."""
    if not file.parent.is_dir():
        return f"there is no folder {str(file.parent)!r}"
    names = [one.name for one in file.parent.glob(f"*{ENDING}")]
    nearest = difflib.get_close_matches(file.name, names, n=_MOST_SHOWN, cutoff=0.0)
    others = f" and {len(names) - len(nearest)} others" if len(names) > len(nearest) else ""
    shown = f"in this folder: {', '.join(nearest)}{others}"
    return shown if names else f"{str(file.parent)!r} has no GGUF files"


def _error(file: Path, reason: str) -> ConfigError:
    return ConfigError("", f"{str(file)!r}: {reason}")


class _Reader:
    """Reader that goes through a file's header once."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self._at = file, data, 0

    def header(self) -> GgufHeader:
        if bytes(self._data[:4]) != _MAGIC:
            raise _error(self._file, "magic is not GGUF: no GGUF file")
        self._at = 4
        version = self._number("<I", "version")
        if version not in _VERSIONS:
            is_turned = version >= _BIG_ENDIAN
            said = "big-endian" if is_turned else f"{version}, not 2 or 3"
            raise _error(self._file, f"version is {said}")
        tensors = self._count("<Q", "tensor_count", _LEAST_TENSOR)
        facts = self._facts(self._count("<Q", "metadata_kv_count", _LEAST_FACT))
        return GgufHeader(self._file, facts, self._tensors(tensors, facts))

    def _facts(self, count: int) -> dict[str, Any]:
        found = dict[str, Any]()
        for number in range(count):
            name = self._text(f"the name of fact {number}")
            if not name or name in found:
                raise _error(self._file, f"the name of fact {number} is empty or used twice")
            found[name] = self._value(self._number("<I", name), name)
        return found

    def _value(self, kind: int, name: str) -> Any:
        if kind == _STRING:
            return self._text(name)
        if kind == _ARRAY:
            return self._list(self._number("<I", name), name)
        return self._number(self._form(kind, name), name)

    def _list(self, kind: int, name: str) -> list[Any]:
        form = "<Q" if kind == _STRING else self._form(kind, name)  # length of a text
        width = struct.calcsize(form)
        count = self._count("<Q", f"the length of {name}", width)
        if count > _MOST_ITEMS:
            raise _error(self._file, f"the length of {name} is {count}, more than {_MOST_ITEMS}")
        if kind == _STRING:
            return self._texts(count, name)
        return list(struct.unpack(f"<{count}{form[1]}", self._take(count * width, name)))

    def _form(self, kind: int, name: str) -> str:
        if kind not in _SCALARS:
            raise _error(self._file, f"{name} is of type {kind}, which is not known")
        return _SCALARS[kind]

    def _tensors(self, count: int, facts: Mapping[str, Any]) -> dict[str, GgufTensor]:
        alignment = facts.get(_ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise _error(self._file, f"{_ALIGNMENT} is {alignment!r}, no power of two from 8 on")
        named = [self._tensor(number) for number in range(count)]
        start = -(-self._at // alignment) * alignment
        found = dict[str, GgufTensor]()
        for name, type_, shape, offset in named:
            if name in found:
                raise _error(self._file, f"tensor {name!r} stands there twice")
            _, values, size = _TYPES[type_]
            if shape[-1] % values:
                reason = f"{shape[-1]} values a row, no multiple of {values}"
                raise _error(self._file, f"tensor {name!r} of {_TYPES[type_][0]} has {reason}")
            taken = math.prod(shape) // values * size
            if offset % alignment:
                raise _error(self._file, f"the offset of tensor {name!r} is not aligned: {offset}")
            if start + offset + taken > len(self._data):
                sizes = f"{len(self._data)} bytes and not {start + offset + taken}"
                raise _error(
                    self._file, f"tensor {name!r} ends beyond the file, which has {sizes}: "
                    "download it again",
                )  # fmt: skip
            found[name] = GgufTensor(
                file=self._file,
                name=name,
                type=_TYPES[type_][0],
                shape=shape,
                start=start + offset,
                size_bytes=taken,
            )
        self._check_apart(sorted(found.values(), key=lambda one: one.start))
        return found

    def _check_apart(self, tensors: Sequence[GgufTensor]) -> None:
        for before, after in pairwise(tensors):
            if before.start + before.size_bytes > after.start:
                raise _error(self._file, f"tensors {before.name!r} and {after.name!r} overlap")

    def _tensor(self, number: int) -> tuple[str, int, tuple[int, ...], int]:
        """Return name, type, shape and offset."""
        name = self._text(f"the name of tensor {number}")
        dimensions = self._number("<I", f"the dimensions of tensor {name!r}")
        if not 1 <= dimensions <= _DIMENSIONS:
            raise _error(self._file, f"tensor {name!r} has {dimensions} dimensions")
        field = f"the shape of tensor {name!r}"
        shape = tuple(self._number("<Q", field) for _ in range(dimensions))[::-1]
        if not 1 <= math.prod(shape) <= _MOST_ELEMENTS:
            raise _error(self._file, f"{field} is {list(shape)}")
        type_ = self._number("<I", f"the type of tensor {name!r}")
        if type_ not in _TYPES:
            known = ", ".join(known for known, _, _ in _TYPES.values())
            reason = f"tensor {name!r} is of type {type_}, which is not read; read are {known}"
            raise _error(self._file, reason)
        return name, type_, shape, self._number("<Q", f"the offset of tensor {name!r}")

    def _texts(self, count: int, name: str) -> list[str]:
        """Read many texts, each like `_text`: a vocabulary has hundreds of thousands."""
        data, at, size = self._data, self._at, len(self._data)
        length, found = struct.Struct("<Q"), list[str]()
        for _ in range(count):
            start = at + length.size
            at = start + (length.unpack_from(data, at)[0] if start <= size else 1)
            if at > size:
                raise _error(self._file, f"ends within {name}: download it again")
            try:
                found.append(data[start:at].decode())
            except UnicodeDecodeError as error:
                raise _error(self._file, f"{name} is no UTF-8") from error
        self._at = at
        return found

    def _text(self, name: str) -> str:
        taken = self._take(self._count("<Q", f"the length of {name}", 1), name)
        try:
            return taken.decode()
        except UnicodeDecodeError as error:
            raise _error(self._file, f"{name} is no UTF-8") from error

    def _count(self, form: str, name: str, least_bytes: int) -> int:
        """Read a number of items that take at least so many bytes each."""
        count: int = self._number(form, name)
        if count * least_bytes > len(self._data) - self._at:
            raise _error(self._file, f"{name} is {count}, more than the file has room for")
        return count

    def _number(self, form: str, name: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form), name))[0]

    def _take(self, size: int, name: str) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise _error(self._file, f"ends within {name}: download it again")
        return self._data[start : self._at]
