"""Arguments that several commands have, and how their errors are told: in one line.

Contract: a bad argument ends with exit code 2 and one line on stderr that names it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn, TypeAlias

BAD_INPUT = 2

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """argparse, with one line for an error instead of the usage and a line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def complain(error: Exception) -> None:
    """One line, whatever a library's message looks like."""
    print(f"specrouter: {' '.join(str(error).split())}", file=sys.stderr)


def default_config(name: str = "tiny.yaml") -> Path:
    """A bundled scenario: inside an installed package, or beside the packages in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs" / name
    return installed if installed.is_file() else package.parent / "configs" / name


def add_config(
    parser: argparse._ActionsContainer,
    name: str = "tiny.yaml",
    described: str = "the bundled tiny pool",
) -> None:
    parser.add_argument(
        "--config", type=scenario_file, default=default_config(name), metavar="FILE",
        help="a YAML scenario, or the name of a bundled one, such as qwen2.5 "
        f"(default: {described})",
    )  # fmt: skip


def scenario_file(text: str) -> Path:
    """A file; where there is none of this name, the bundled scenario that is called so."""
    path, bundled = Path(text), default_config(f"{text}.yaml")
    return bundled if not path.exists() and bundled.is_file() else path
