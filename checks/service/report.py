"""Report: named checks that pass or fail, shown as they end, and as a table.

Contract: a check that fails does not stop those after it. The standard library alone, since reports
are also written in environments of other packages.
"""

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


@dataclass
class Finding:
    """What a check has to say beside that it passed."""

    text: str = ""


@dataclass
class Report:
    subject: str
    checks: list[Check] = field(default_factory=list)

    @contextmanager
    def check(self, name: str) -> Iterator[Finding]:
        """Passes unless the block raises; the finding's text is shown beside it."""
        finding, began_s = Finding(), time.monotonic()
        try:
            yield finding
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self._add(Check(f"{self.subject}: {name}", False, reason[:400]))
        else:
            took = f"{time.monotonic() - began_s:.1f} s"
            detail = f"{finding.text}, {took}" if finding.text else took
            self._add(Check(f"{self.subject}: {name}", True, detail))

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps([asdict(check) for check in self.checks]), encoding="utf-8")

    def include(self, path: Path) -> None:
        """Checks that another process saved; that it saved none is a failure."""
        if not path.is_file():
            self._add(Check(f"{self.subject}: {path.stem}", False, "has saved no report"))
            return
        saved = json.loads(path.read_text(encoding="utf-8"))
        self.checks += [Check(**check) for check in saved]

    def show(self) -> int:
        """The exit code of a program that reports this."""
        width = max(len(check.name) for check in self.checks)
        print(f"\n{self.subject}")
        for check in self.checks:
            print(f"  {'ok  ' if check.passed else 'FAIL'}  {check.name:<{width}}  {check.detail}")
        failed = sum(not check.passed for check in self.checks)
        print(f"  {len(self.checks) - failed} of {len(self.checks)} passed", flush=True)
        return 0 if self.passed else 1

    def _add(self, check: Check) -> None:
        self.checks.append(check)
        print(f"{'ok  ' if check.passed else 'FAIL'} {check.name}  {check.detail}", flush=True)
