"""Docstrings of the product begin with a sentence, not with a fragment such as "Of a layer."."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("specrouter", "processors", "statemgr", "modelpool", "examples")
FRAGMENTS = (
    "After Against As At Because Before Beside Between By For From How If In Into Not Of On Over"
    " Since That Through Those To Under Unless Until What Whatever When Where Whether Which Who"
    " Whoever With Within Without"
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_docstrings_begin_with_a_sentence() -> None:
    fragments, words = [], set(FRAGMENTS.split())
    for file in (file for package in PRODUCT for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text and text.split()[0].strip(",.:;") in words:
                fragments.append(f"{file.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not fragments, "\n".join(fragments)


def test_no_name_and_no_text_speaks_of_who_is_told_what() -> None:
    """A name says what a value is; a sentence names the thing that acts."""
    word = re.compile(r"(?<![A-Za-z])(told|tells|nobody)(?![A-Za-z])", re.IGNORECASE)
    files = [file for package in PRODUCT for file in (ROOT / package).rglob("*.py")]
    files += [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if word.search(line)
    ]
    assert not found, "\n".join(found)


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for file in (file for package in PRODUCT for file in (ROOT / package).rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
