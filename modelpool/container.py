"""Memory limits of a container, which `/proc/meminfo` does not show.

Linux keeps them in control groups, version 2 or 1. The limit of a group holds for all groups below
it, so the groups above one's own count as well; in a container they are often not visible.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that a group may hold at most, and those of them that are still free."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class _Version:
    controllers: str  # the second field of a line in /proc/self/cgroup
    mount: str
    limit: str
    usage: str
    cache: tuple[str, ...]  # fields of `memory.stat`, which include all groups below


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
    """Return the limits of this process's groups, if there are any; `root` is for tests."""
    found = []
    for version in _VERSIONS:
        for group in _groups(version, root):
            limit = _limit(version, group)
            if limit is not None:
                found.append(limit)
    return tuple(found)


def _groups(version: _Version, root: Path) -> Iterator[Path]:
    """Yield the directories of this process's group and of those above it."""
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
    cache = sum(int(stat.get(name, 0)) for name in version.cache)  # the kernel frees it on demand
    return MemoryLimit(int(most), max(0, int(most) - max(0, int(used) - cache)))


def _read(file: Path) -> str:
    """Return the text of a file, empty if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
