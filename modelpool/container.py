"""What a container may take of its machine's memory, which `/proc/meminfo` does not tell.

Linux keeps it in control groups, version 2 or 1. A group's limit holds for all beneath it, so the
groups above one's own count as well; in a container they are often not to be seen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that a group may hold at most, and those of them that it could still take."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class _Version:
    controllers: str  # the second field of a line in /proc/self/cgroup
    mount: str
    limit: str
    usage: str
    cache: tuple[str, ...]  # in `memory.stat`, of all groups beneath too


_VERSIONS = (
    _Version(
        "",
        "sys/fs/cgroup",
        "memory.max",
        "memory.current",
        ("inactive_file", "active_file"),
    ),
    _Version(
        "memory",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def memory_limits(root: Path = ROOT) -> tuple[MemoryLimit, ...]:
    """The limits of this process's groups; empty where there are none. `root`: for tests."""
    found = []
    for version in _VERSIONS:
        for group in _groups(version, root):
            limit = _limit(version, group)
            if limit is not None:
                found.append(limit)
    return tuple(found)


def _groups(version: _Version, root: Path) -> Iterator[Path]:
    """The directories of this process's group and of those above it."""
    mount = root / version.mount
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if version.controllers in controllers.split(","):
            own = mount / path.lstrip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(mount))


def _limit(version: _Version, group: Path) -> MemoryLimit | None:
    most, used = (_read(group / name).strip() for name in (version.limit, version.usage))
    if not most.isdecimal() or not used.isdecimal():  # "max", or no such file
        return None
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    cache = sum(int(stat.get(name, 0)) for name in version.cache)  # given up when asked for
    return MemoryLimit(int(most), max(0, int(most) - max(0, int(used) - cache)))


def _read(file: Path) -> str:
    """Empty where it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
