"""Arguments that several commands share, and one-line error messages for them.

Contract: a bad argument ends with exit code 2 and one line on stderr that names it. Modules that
declare arguments import nothing slow: `--help` and such errors come at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from specrouter.scenarios import scenario_folder

BAD_INPUT = 2

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, without the usage.

    With `has_prompt`, a PROMPT follows the TARGET, and options may stand between the two.
    """

    has_prompt = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, left = super().parse_known_args(args, namespace)
        is_parted = self.has_prompt and found.target is None and found.config is None
        if is_parted and len(left) == 1 and not left[0].startswith("-"):
            found.target, found.prompt, left = found.prompt, left[0], []
        return found, left

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: PROMPT"):
            message += " (--draft takes all words behind it: it stands behind TARGET and PROMPT)"
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def complain(error: object) -> None:
    """Print an error as one line, also if its message has several."""
    print(f"specrouter: {' '.join(str(error).split())}", file=sys.stderr)


def default_config(name: str = "tiny.yaml") -> Path:
    """Return the file of a bundled scenario."""
    return scenario_folder() / name
