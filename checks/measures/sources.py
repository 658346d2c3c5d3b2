"""The library's source files, parsed: what the measures of its structure read."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

PACKAGES = ("specrouter", "processors", "statemgr", "modelpool")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A file. `path` is relative to the work tree."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def functions(self) -> Iterator[Function]:
        """All of the file: methods and functions within functions too."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node


@dataclass(frozen=True)
class Sources:
    """Those of the packages, by path."""

    root: Path
    files: Sequence[Source]

    @classmethod
    def of(cls, root: Path) -> Self:
        paths = [path for name in PACKAGES for path in sorted((root / name).rglob("*.py"))]
        return cls(root, [Source(path.relative_to(root), path.read_text()) for path in paths])

    def imports(self) -> Mapping[str, frozenset[str]]:
        """By module: the modules of the library that it imports, wherever in the file."""
        known = {source.module for source in self.files}
        return {
            source.module: frozenset(_imports(source.tree, known)) - {source.module}
            for source in self.files
        }


def _imports(tree: ast.Module, known: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            named = [name if name in known else node.module for name in submodules]
            yield from (name for name in named if name in known)
