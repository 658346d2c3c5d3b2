"""Prints how large each room is, beside what it was and should be.

python -m checks.measures [--root WORK_TREE]
"""

import argparse
from pathlib import Path

from checks.measures.rooms import (
    BEFORE_COMMIT,
    DOCUMENTS_KB,
    PRODUCT,
    ROOMS,
    Room,
    function_lines,
    kilobytes,
    line_length,
    lines,
)

ROOT = Path(__file__).resolve().parents[2]
_ROW = "{:<30}{:>9}{:>9}{:>9}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m checks.measures", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the work tree to read")
    root: Path = parser.parse_args().root

    def row(name: str, room: Room, now: int) -> str:
        return _ROW.format(name, f"{room.before:,}", f"{now:,}", f"{room.aim:,}")

    print(_ROW.format("lines", BEFORE_COMMIT, "now", "aim"))
    for name, room in ROOMS.items():
        print(row(name, room, lines(root, room)))
    print(row("product with examples", PRODUCT, lines(root, PRODUCT)))
    print(row("documents, kB", DOCUMENTS_KB, kilobytes(root, DOCUMENTS_KB)))
    print(f"characters of a line, mean: {line_length(root, PRODUCT):.1f}")
    print(f"lines of a function, median: {function_lines(root, PRODUCT):g}")


if __name__ == "__main__":
    main()
