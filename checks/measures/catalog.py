"""What is measured, what it was before the redesign, and what it should be."""

from collections.abc import Sequence
from pathlib import Path

from checks.measures import decision_code, structure
from checks.measures.running import Running
from checks.measures.sources import Sources
from checks.measures.table import Measure


def measures(root: Path, running: Running | None = None) -> list[Measure]:
    """All of a work tree; without `running` those that need none have values."""
    sources = Sources.of(root)
    return [*_structure(sources), *_running(running), *_documents(sources), *_decisions(sources)]


def _structure(sources: Sources) -> list[Measure]:
    def counted(
        name: str, before: int, found: Sequence[str], goal: int, reason: str = ""
    ) -> Measure:
        return Measure(name, before, len(found), goal, reason, found)

    views = "views stand between policies and the profile that they are told of"
    single = "seven are folders; six are single files: the API, data that rooms exchange, logs"
    named = "the API's arguments by name, and the interface of attention in transformers"
    steps = structure.step_statements(sources)
    return [
        counted("rooms of specrouter/", 58, structure.rooms(sources), 8, single),
        counted(
            "floors: longest chain of imports of rooms", 22, structure.floors(sources), 12, views
        ),
        counted("files over 300 lines", 24, structure.long_files(sources), 6),
        counted("functions over 40 lines", 21, structure.long_functions(sources), 5),
        counted("functions of over 6 parameters", 27, structure.wide_functions(sources), 5, named),
        Measure("statements of step()", 23, steps, 12),
    ]


def _running(running: Running | None) -> list[Measure]:
    def counted(
        name: str, before: int, found: Sequence[str] | None, goal: int, reason: str
    ) -> Measure:
        return Measure(
            name, before, None if found is None else len(found), goal, reason, found or ()
        )

    attention, decision, way = (
        (running.to_attention, running.to_decision, running.way) if running else (None,) * 3
    )
    guarded = "a guard against hangs, one against faults, and the packed forward are a frame each"
    stages = (
        "planner, routes, decisions, scheduler, grid, curves: each is pure and tested by itself"
    )
    bounded = "bounds before admission and guards against faults, each one function, came with use"
    return [
        counted("frames from step() to attention", 15, attention, 11, guarded),
        counted("frames from step() to a decision's end", 18, decision, 9, stages),
        counted("functions on a request's way, HTTP to token", 58, way, 40, bounded),
    ]


def _documents(sources: Sources) -> list[Measure]:
    readme = (sources.root / "README.md").read_text(encoding="utf-8")
    untested = structure.untested_files(sources)
    return [
        Measure("characters of README.md", 16535, len(readme), 6000),
        Measure("files without a test of their own", 7, len(untested), 0, details=untested),
    ]


def _decisions(sources: Sources) -> list[Measure]:
    found = decision_code.measure(sources)
    files = [str(one.path) for one in decision_code.decision_files(sources)]
    lines, code = "lines of decision code, no comments", "the same, no blank lines or docstrings"
    later = "much of it is of later policies: SLOs-Serve's, and SpecuStream with its 8 constants"
    kept = "what is left has a test that states what it is for, or a figure in docs/design.md"
    tables = "tables of sizes and shapes, and AdaServe's published settings, are half of them"
    return [
        Measure(lines, 5677, found.lines, 3500, f"{later}; {kept}", files),
        Measure(code, 3959, found.code_lines, 3500),
        Measure("numbers in constants of decision code", 224, found.numbers, 50, tables),
        Measure("named numeric constants of decision code", 126, found.named_constants, 50, kept),
        Measure("types of decision code", 69, found.types, 40, later),
    ]
