"""`python -m research.replay`: recorded decisions, decided again by the code of this tree.

Prints a table, and one JSON document as the last line. "now" and "recorded" are how far the chains
lie below the best measured one in the mean, "regret" is the same of those that differ. Exit code 1:
what is lost now is more than was lost then by `--most-loss`; with `--same`, fewer than
`--least-same` of all decisions have the same chain (for changes that are to change none).
`python -m research.replay digest` is for policies in simulated time: see `research.replay.digest`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from research.replay import digest
from research.replay.compare import Compared, Figures, decide_again, switched
from research.replay.recording import FOLDER, SUFFIX, Recording

_SHOWN = 5  # switches of chain that are listed


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    paths = sorted(options.folder.glob(f"*{SUFFIX}"))
    chosen = [path for path in paths if not options.names or _name(path) in options.names]
    if not chosen:
        print(f"no recording in {options.folder} has that name", file=sys.stderr)
        return 2
    found: dict[str, list[Compared]] = {}
    for path in chosen:
        recording = Recording.load(path)
        total = min(recording.decisions, options.first or recording.decisions)
        with tqdm(total=total, desc=_name(path), file=sys.stderr) as bar:
            found[_name(path)] = decide_again(recording, options.first, bar.update)
    everything = [one for each in found.values() for one in each]
    rows = {name: Figures.of(each) for name, each in found.items()}
    rows["total"] = Figures.of(everything)
    print(table(rows))
    for (before, after), count in switched(everything).most_common(_SHOWN):
        print(f"{count} times {'>'.join(after)} instead of {'>'.join(before)}")
    total_row = rows["total"]
    if options.same:
        is_fine = total_row.same_chain >= options.least_same
    else:
        is_fine = total_row.loss_now <= total_row.loss + options.most_loss
    document = {"ok": is_fine, "recordings": {name: asdict(row) for name, row in rows.items()}}
    print(json.dumps(document))
    return 0 if is_fine else 1


def table(rows: Mapping[str, Figures]) -> str:
    head = f"{'recording':20} {'decisions':>9} {'same chain':>10} {'same route':>10}"
    lines = [f"{head} {'scored':>7} {'regret':>7} {'now':>7} {'recorded':>9}"]
    for name, row in rows.items():
        lines.append(
            f"{name:20} {row.decisions:9} {row.same_chain:10.2%} {row.same_route:10.2%} "
            f"{row.scored:7} {row.regret:7.2%} {row.loss_now:7.2%} {row.loss:9.2%}"
        )
    return "\n".join(lines)


def _name(path: Path) -> str:
    return path.name.removesuffix(SUFFIX)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m research.replay", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", help="recordings; all by default")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--first", type=int, help="decisions of each recording; all by default")
    parser.add_argument("--most-loss", type=float, default=0.01, help="beyond what was lost")
    parser.add_argument("--same", action="store_true", help="judge by equal chains instead")
    parser.add_argument("--least-same", type=float, default=0.95, help="share of same chains")
    return parser


if __name__ == "__main__":
    is_digest = sys.argv[1:2] == ["digest"]
    sys.exit(digest.main(sys.argv[2:]) if is_digest else main())
