"""Arguments that several commands have, and how their errors are told: in one line.

Contract: a bad argument ends with exit code 2 and one line on stderr that names it. What declares
arguments imports nothing that takes long: `--help` and such errors come at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn, TypeAlias

from specrouter.scenarios import scenario_folder

BAD_INPUT = 2

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """argparse, with one line for an error instead of the usage and a line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def complain(error: object) -> None:
    """One line, whatever a library's message looks like."""
    print(f"specrouter: {' '.join(str(error).split())}", file=sys.stderr)


def default_config(name: str = "tiny.yaml") -> Path:
    """The file of a bundled scenario."""
    return scenario_folder() / name
