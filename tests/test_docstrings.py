"""Docstrings of the product begin with a sentence, not with a fragment such as "Of a layer."."""

from __future__ import annotations

import ast
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
