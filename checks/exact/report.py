"""What a check prints: a progress line while it runs, one JSON document at its end."""

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers


class Progress:
    """A line on standard error: rewritten on a terminal, else at most one in ten seconds."""

    def __init__(self, check: str, total: int) -> None:
        self.check = check
        self.total = total
        self.done = 0
        self.note = ""
        self._started = self._shown = time.monotonic()

    def __call__(self, note: str | None = None) -> None:
        """One more is done."""
        self.done += 1
        self.note = self.note if note is None else note
        now = time.monotonic()
        live = sys.stderr.isatty()
        if self.done < self.total and now - self._shown < (0.2 if live else 10.0):
            return
        self._shown = now
        line = f"{self.check} {self.done}/{self.total} {now - self._started:.0f} s {self.note}"
        start, end = ("\r\033[K", "") if live and self.done < self.total else ("", "\n")
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)


def cpu_name() -> str:
    """The processor's name as the system gives it, with family and model where it has them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    known = {key.strip(): value.strip() for key, value in facts.items()}
    name = known.get("model name", platform.machine())
    return f"{name} (family {known.get('cpu family', '?')}, model {known.get('model', '?')})"


def few_threads() -> int:
    """What a check takes by default: two, or one where other checks run beside it."""
    return min(2, torch.get_num_threads())


def prepare(threads: int) -> None:
    """Sets torch's threads and silences `transformers`' own progress bars."""
    torch.set_num_threads(threads)
    cast(Any, transformers.utils.logging).disable_progress_bar()


def conditions() -> dict[str, object]:
    """What figures depend on beside the code."""
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def make_parser(doc: str | None, threads: int | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=threads or few_threads())
    return parser


def finish(check: str, passed: bool, started: float, figures: Mapping[str, object]) -> int:
    """Prints the document; returns the exit code. `started` is of `time.monotonic`."""
    document = {
        "check": check,
        "passed": passed,
        "seconds": round(time.monotonic() - started, 1),
        **figures,
        "conditions": conditions(),
    }
    print(json.dumps(document), flush=True)
    return 0 if passed else 1
