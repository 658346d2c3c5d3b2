"""`specrouter pairs`: models on this machine that may draft for a target, and what each costs."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specrouter.cli.arguments import Commands

if TYPE_CHECKING:
    from modelpool.drafters import Candidate
    from modelpool.member import Member

_HEAD = ("drafter", "parameters", "reads", "ms", "of target", "")


def add_pairs(commands: Commands) -> None:
    parser = commands.add_parser(
        "pairs",
        help="list models on this machine that may draft for a target, and what --draft auto takes",
        description="Looks through the hub's local cache, the folders beside a target that is one, "
        "and those that are given. Reads no weights and downloads nothing.",
    )
    parser.add_argument("target", metavar="TARGET", help="as serve has it, a model")
    parser.add_argument(
        "--folder", nargs="+", type=Path, default=[], metavar="DIR",
        help="checkpoints, or folders with checkpoints in them",
    )  # fmt: skip
    parser.set_defaults(run=_pairs, log_level=logging.ERROR)


def _pairs(arguments: argparse.Namespace) -> int:
    from modelpool.drafters import candidates, find_target
    from modelpool.fast.memory_speed import read_bytes_per_s
    from specrouter.target import source_of

    target = find_target(source_of(arguments.target, "TARGET"), "TARGET")
    found = candidates(target, arguments.folder)
    print(shown_pairs(target, found, read_bytes_per_s()))
    return 0


def shown_pairs(target: Member, found: Sequence[Candidate], speed: float) -> str:
    """`speed`: of the CPU's memory, in bytes/s, as measured."""
    from modelpool.drafters import picked, read_bytes

    taken, own = picked(found), read_bytes(target)
    rows = [
        _HEAD,
        (target.config.name, *_costs(target.facts.parameter_count, own, speed), "", "target"),
    ]
    for one in found:
        verdict = "fits" if one.refusal is None else f"no: {one.refusal}"
        share = "" if one.share is None else f"{one.share:.0%}"
        said = f"{verdict}; --draft auto takes it" if one is taken else verdict
        rows.append((one.name, *_costs(one.parameters, one.read_bytes, speed), share, said))
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD) - 1)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), row[-1]]
        ).rstrip()
        for row in rows
    ]
    lines.append(f"ms: of a token, by the {speed / 1e9:.1f} GB/s at which this CPU reads memory")
    if taken is None:
        lines.append("--draft auto takes ngram alone")
    return "\n".join([*lines, *_siblings(target, found)])


def _costs(parameters: int | None, read: int | None, speed: float) -> tuple[str, str, str]:
    if parameters is None or read is None:
        return "", "", ""
    return f"{parameters / 1e6:,.1f}M", f"{read / 1e6:,.1f} MB", f"{read / speed * 1000:.2f}"


def _siblings(target: Member, found: Sequence[Candidate]) -> list[str]:
    """Smaller models of the target's family that are not here, by what is known of families."""
    from modelpool.families import family_of

    name = target.config.name
    family = family_of(name)
    if family is None:
        return []
    here = {one.name for one in found}
    missing = [one for one in family.smaller_than(name) if one not in here]
    return [f"not here, of {family.name}: {', '.join(missing)}"] if missing else []
