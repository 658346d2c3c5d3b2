"""What README and docs/ tell a reader to type: shell commands and Python."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELLS = {"", "sh", "bash", "shell", "console"}
# With which a block begins that is a shell's, where its language is not named.
_PROGRAMS = {
    "cd", "curl", "docker", "echo", "export", "git", "kubectl", "make", "pip", "python", "python3",
    "specrouter", "sudo", "uv",
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """One line of a shell, continued lines joined, without its comment."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


@dataclass(frozen=True)
class Snippet:
    """A block of Python. It is complete if it imports what it uses first."""

    page: str
    line: int
    text: str

    @property
    def is_complete(self) -> bool:
        return self.text.startswith(("import ", "from "))

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fences(page: Path) -> Iterator[tuple[str, str, int]]:
    """Language, text and first line of every block."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        yield found[1], found[2], text.count("\n", 0, found.start()) + 1


def commands() -> list[Command]:
    return [
        Command(page.name, tuple(words))
        for page in PAGES
        for language, text, _ in fences(page)
        if language in _SHELLS
        for words in _lines(text, is_shell=bool(language))
    ]


def snippets() -> list[Snippet]:
    return [
        Snippet(page.name, line, text)
        for page in PAGES
        for language, text, line in fences(page)
        if language == "python"
    ]


def _lines(text: str, is_shell: bool) -> Iterator[list[str]]:
    """Words of each command. A quoted argument may span lines, as JSON does."""
    first = text.split(maxsplit=1)[0] if text.split() else ""
    if not is_shell and first.rpartition("/")[2] not in _PROGRAMS:
        return  # output, or a tree of files
    waiting = ""
    for line in text.replace("\\\n", " ").splitlines():
        waiting += line.removeprefix("$ ") + "\n"
        try:
            words = shlex.split(waiting, comments=True)
        except ValueError:  # within quotes
            continue
        if words:
            yield words
        waiting = ""
    if waiting.strip():
        raise ValueError(f"no shell can read {waiting!r}")
