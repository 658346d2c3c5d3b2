"""How much the code is that decides: `routing/`, `slo/` and `profile/`.

Where these were not folders yet, the files that became them are counted.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checks.measures.sources import Function, Source, Sources

FOLDERS = ("specrouter/routing", "specrouter/slo", "specrouter/profile")
# The same at commit 1c73a43, in `specrouter/`.
BEFORE = (
    "acceptance", "audition_policy", "bench/policies", "calibration", "catch_up", "cost_model",
    "cycle_choice", "decision_keeper", "decision_record", "decode_counts", "machine_speed",
    "model_times", "outcomes", "planner", "prediction", "profiler", "request_drafters", "route",
    "scheduler", "slo_accounts", "time_curve", "time_profile", "tree_planner", "tree_selection",
    "tree_shape",
)  # fmt: skip

_SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
_Documented = ast.Module | ast.ClassDef | Function


@dataclass(frozen=True)
class DecisionCode:
    """Attributes:
    lines: without lines of comments alone; blank lines and docstrings count.
    code_lines: without blank lines and docstrings either.
    numbers: in constants of modules; a tuple counts as many as it has.
    named_constants: names that modules give to expressions with a number.
    types: classes.
    """

    lines: int
    code_lines: int
    numbers: int
    named_constants: int
    types: int


def measure(sources: Sources) -> DecisionCode:
    files = list(decision_files(sources))
    values = [value for source in files for value in _module_values(source)]
    counts = [count for value in values if (count := _numbers(value))]
    return DecisionCode(
        sum(one.lines - _comment_lines(one.text) for one in files),
        sum(len(lines_of_code(one.text)) for one in files),
        sum(counts),
        len(counts),
        sum(isinstance(node, ast.ClassDef) for one in files for node in ast.walk(one.tree)),
    )


def decision_files(sources: Sources) -> list[Source]:
    found = [one for one in sources.files if one.path.parent.as_posix().startswith(FOLDERS)]
    earlier = {Path(f"specrouter/{name}.py") for name in BEFORE}
    return found or [one for one in sources.files if one.path in earlier]


def lines_of_code(text: str) -> set[int]:
    """Numbers of the lines that hold code: no blank lines, comments or docstrings."""
    found = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _Documented) and ast.get_docstring(node) is not None:
            first = node.body[0]
            assert first.end_lineno is not None
            found -= set(range(first.lineno, first.end_lineno + 1))
    return found


def _comment_lines(text: str) -> int:
    return sum(line.lstrip().startswith("#") for line in text.splitlines())


def _module_values(source: Source) -> Iterator[ast.expr]:
    for node in source.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            yield node.value


def _numbers(value: ast.expr) -> int:
    """Numbers that are written in an expression."""
    constants = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return sum(isinstance(one, int | float) and not isinstance(one, bool) for one in constants)
