"""Sources of the C library and their compilation, on first use or into a wheel (`setup.py`).

Contract: instructions that some CPUs lack are used only after a check of the CPU, and sums are not
reordered: the library has the same bits wherever it was compiled. This module imports only Python's
standard library.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

FOLDER, NAME = Path(__file__).parent, "linear.so"
_ATTENDS = ("avx2", "avx512", "neon", "plain")  # by instruction set
ATTENTION = ("attend.c", "attend_double.c", *(f"attend_{name}.c" for name in _ATTENDS))
SOURCES = ("linear.c", "blocks.c", "panels.c", "recurrence.c", "layer.c", "choose.c", *ATTENTION)
_HEADERS = (
    *("linear_x86.h", "linear_arm.h", "dot_panel.h", "linear.h", "threads.h"),
    *("attend.h", "attend_pass.h", *(f"lanes_{name}.h" for name in _ATTENDS)),
)
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
)
_COMPILE_S = 120.0


def find_compiler() -> Sequence[str]:
    """Return the command of the C compiler; raise `RuntimeError` if there is none."""
    asked = os.environ.get("CC", "")  # may have options, such as "ccache gcc"
    try:
        given = shlex.split(asked)
    except ValueError as error:
        raise RuntimeError(f"CC={asked}: {error}: correct it, or unset it") from error
    compiler = given or [one for one in ("cc", "gcc") if shutil.which(one)][:1]
    if not compiler:
        raise RuntimeError("there is no C compiler")
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(f"CC={asked}: there is no {compiler[0]}")
    return compiler


def fingerprint(compiler: Sequence[str]) -> str:
    """Return a hash of sources, flags and compiler."""
    version = subprocess.run(
        (*compiler, "--version"), capture_output=True, check=True, timeout=_COMPILE_S
    ).stdout
    text = b"\0".join((FOLDER / name).read_bytes() for name in (*SOURCES, *_HEADERS))
    command = " ".join((*compiler, *FLAGS)).encode()
    return hashlib.sha256(b"\0".join((text, version, command))).hexdigest()[:16]


def compile_library(compiler: Sequence[str], folder: Path) -> None:
    """Compile `NAME` in `folder`, file by file, as many at once as there are cores.

    Raises `RuntimeError`, and what `subprocess.run` raises.
    """
    objects = [folder / f"{name}.o" for name in SOURCES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = (
            ("-c", str(FOLDER / name), "-o", str(made))
            for name, made in zip(SOURCES, objects, strict=True)
        )
        list(pool.map(partial(_run, compiler), jobs))
    made = folder / NAME
    _run(compiler, ("-shared", "-o", str(made), *map(str, objects)))
    for each in objects:
        each.unlink()
    made.chmod(0o700)


def _run(compiler: Sequence[str], arguments: Sequence[str]) -> None:
    command = (*compiler, *FLAGS, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"{compiler[0]} cannot compile it: {lines[0]}")
