"""A container's memory is what its control groups leave it, not what the machine has."""

from pathlib import Path

import pytest

from modelpool.container import MemoryLimit, memory_limits
from modelpool.device_manager import _read_cpu

KIB = 1024
V1_UNLIMITED = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def v2(group: str, limit: object, used: int, cache: int = 0) -> dict[str, object]:
    place = f"sys/fs/cgroup{group}"
    stat = f"anon 7\ninactive_file {cache}\nactive_file 0"
    return {
        f"{place}/memory.max": limit,
        f"{place}/memory.current": used,
        f"{place}/memory.stat": stat,
    }


def v1(group: str, limit: int, used: int, cache: int = 0) -> dict[str, object]:
    place = f"sys/fs/cgroup/memory{group}"
    return {
        f"{place}/memory.limit_in_bytes": limit,
        f"{place}/memory.usage_in_bytes": used,
        f"{place}/memory.stat": f"inactive_file 1\ntotal_active_file {cache}",
    }


OWN_V2 = {"proc/self/cgroup": "0::/", "proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 800 kB"}
OWN_V1 = {**OWN_V2, "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (OWN_V2, 800),
        ({**OWN_V2, **v2("", 500 * KIB, 200 * KIB)}, 300),
        ({**OWN_V2, **v2("", 500 * KIB, 450 * KIB, cache=250 * KIB)}, 300),  # it can be let go
        ({**OWN_V2, **v2("", 500 * KIB, 600 * KIB)}, 0),
        ({**OWN_V2, **v2("", "max", 200 * KIB)}, 800),
        ({**OWN_V2, **v2("", 5000 * KIB, 200 * KIB)}, 800),
        ({**OWN_V1, **v1("/docker/x", 400 * KIB, 300 * KIB, cache=100 * KIB)}, 200),
        ({**OWN_V1, **v1("", 400 * KIB, 300 * KIB)}, 100),  # the group is mounted as the root
        ({**OWN_V1, **v1("/docker/x", V1_UNLIMITED, 300 * KIB)}, 800),
    ],
)
def test_free_memory_is_the_least_that_machine_and_container_leave(
    files: dict[str, object], free: int, tmp_path: Path
) -> None:
    assert _read_cpu(write(tmp_path, files)).free_bytes == free * KIB


def test_the_limits_of_groups_above_hold_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/container",
        **v2("/pod/container", 900, 100),
        **v2("/pod", 500, 300),
    }
    assert memory_limits(write(tmp_path, files)) == (MemoryLimit(900, 800), MemoryLimit(500, 200))
