"""Prints every measure of the code's shape beside its goal; the last line is JSON.

    python -m checks.measures [--details] [--static] [--root WORK_TREE]

`--static` leaves out what needs a running service (half a minute). `--root` reads the sources of
another work tree; to measure a running service there too, copy `checks/measures` into it and run
it from there, as was done for the values before the redesign.
"""

import argparse
import json
from pathlib import Path

from checks.measures.catalog import measures
from checks.measures.table import BEFORE_COMMIT, lines_of

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m checks.measures", description=__doc__)
    parser.add_argument("--details", action="store_true", help="list what was counted")
    parser.add_argument("--static", action="store_true", help="run nothing, read the sources only")
    parser.add_argument("--root", type=Path, default=ROOT, help="the work tree to read")
    options = parser.parse_args()
    running = None
    if not options.static:
        from checks.measures.running import measure

        running = measure()
    found = measures(options.root, running)
    print(*lines_of(found), sep="\n")
    if options.details:
        for one in found:
            print(f"\n{one.name}:", *one.details, sep="\n  ")
    rows = [one.to_json() for one in found]
    print(json.dumps({"before": BEFORE_COMMIT, "measures": rows}))


if __name__ == "__main__":
    main()
