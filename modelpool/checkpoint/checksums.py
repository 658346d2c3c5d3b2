"""Checksums of a folder's files, kept beside them: whether they are still what was written."""

import json
from pathlib import Path

from modelpool.checkpoint.cache_dir import checksum, is_regular

NAME = "checksums.json"


def write_checksums(folder: Path) -> None:
    """Of all files in the folder. Raises `OSError`."""
    found = {file.name: checksum(file) for file in sorted(_files(folder))}
    (folder / NAME).write_text(json.dumps(found, indent=1))


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that `write_checksums` has seen. Reads it all."""
    try:
        known = json.loads(_read(folder / NAME))
        if not isinstance(known, dict) or not known:
            return f"{NAME} names no files"
        for file in _files(folder):
            if file.name not in known:
                return f"{file.name} does not belong there"
        for name, facts in known.items():
            file = folder / name
            if not is_regular(file) or file.stat().st_size != facts[0]:
                return f"{name} has another size"
            if list(checksum(file)) != facts:
                return f"{name} has another checksum"
    except FileNotFoundError as error:
        return f"there is no {Path(error.filename).name}"
    except Exception as error:  # any content of the file that names them
        return f"{type(error).__name__}: {error}"
    return None


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.name != NAME and file.name[0] != "."]


def _read(file: Path) -> str:
    if not is_regular(file):
        raise ValueError(f"{file.name} is no file")
    return file.read_text(encoding="utf-8")
