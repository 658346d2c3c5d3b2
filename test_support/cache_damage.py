"""Kinds of damage to what lies in the cache, by name: of a file, and of a folder of files.

Each takes the path of something whole. What a file's damage leaves is not what was there.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

Damage = Callable[[Path], None]

_TEXTS: Mapping[str, bytes] = {
    "empty": b"",
    "a space": b" ",
    "zeros": bytes(4096),
    "brace": b"{",
    "list": b"[]",
    "null": b"null",
    "number": b"7",
    "huge number": b"9" * 10_000,
    "text": b'"text"',
    "another object": b'{"format": 0}',
    "no UTF-8": b"\x00\xff\xfe",
    "UTF-16": "{}".encode("utf-16"),
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"times":' * 100_000,
    "large": b'{"a": "' + b"x" * 2**21 + b'"}',
    "not a number": b'{"crc32": NaN, "times": NaN}',
    "wrong types": b'{"crc32": "1", "times": [1, 2]}',
    "html": b"<!doctype html><title>404</title>",
    "pickle": b"\x80\x04N.",
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _cut(share: float, path: Path) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _flip(share: float, path: Path) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    content[int((len(content) - 1) * share)] ^= 1
    path.write_bytes(content)


def _overwrite(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 3)
        file.write(b"\x5a" * max(1, size // 4))


def _folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(target: str, path: Path) -> None:
    path.unlink()
    path.symlink_to(target)


OF_FILE: Mapping[str, Damage] = {
    **{name: partial(_write, content) for name, content in _TEXTS.items()},
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut to half": partial(_cut, 0.5),
    "one more byte": _append,
    "a bit at the beginning": partial(_flip, 0.0),
    "a bit in the middle": partial(_flip, 0.5),
    "a bit at the end": partial(_flip, 1.0),
    "overwritten": _overwrite,
    "gone": Path.unlink,
    "a folder": _folder,
    "a pipe": _pipe,
    "a link to nothing": partial(_link, "nothing"),
    "a link to itself": lambda path: _link(path.name, path),
    "a device": partial(_link, "/dev/null"),
}


def _numbers(change: Callable[[float], object], path: Path) -> None:
    """All numbers of a JSON file changed, and its checksum left as it was."""

    def changed(value: object) -> object:
        if isinstance(value, dict):
            return {name: one if name == "crc32" else changed(one) for name, one in value.items()}
        if isinstance(value, list):
            return [changed(one) for one in value]
        return change(value) if isinstance(value, int | float) else value

    path.write_text(json.dumps(changed(json.loads(path.read_text()))))


OF_NUMBERS: Mapping[str, Damage] = {
    "negative": partial(_numbers, lambda value: -value),
    "none": partial(_numbers, lambda _: 0),
    "beyond a float": partial(_numbers, lambda _: 10**400),
    "infinite": partial(_numbers, lambda _: float("inf")),
    "no numbers": partial(_numbers, lambda _: float("nan")),
    "texts": partial(_numbers, str),
    "nulls": partial(_numbers, lambda _: None),
    "a thousandth": partial(_numbers, lambda value: value / 1000),
}


def _in_its_place(content: bytes, path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(content)


def _emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _linked(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("nowhere")


def _stray(name: str, path: Path) -> None:
    (path / name).write_text('{"weight_map": {"a": "b"}}')


OF_FOLDER: Mapping[str, Damage] = {
    "an empty file": partial(_in_its_place, b""),
    "a file": partial(_in_its_place, b"x" * 1000),
    "empty": _emptied,
    "a link to nothing": _linked,
    "a stray index": partial(_stray, "model.safetensors.index.json"),
    "stray weights": partial(_stray, "adapter.safetensors"),
}
