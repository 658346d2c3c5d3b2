"""The C library of layers, attention, recurrences and the choice of tokens: found or compiled.

Contract: `c_library` returns None without a compiler, and `linear_kernels` if the CPU lacks the
instructions: a log line says why, and models are computed in another way, or slower. A wheel may
contain the library beside this file. Otherwise it is compiled into the cache, in a folder named by
source, flags and compiler, with its checksum: a damaged library would end the process, and is
compiled again (`cached_folder`). Files there that do not belong to this user are not loaded.

`SPECROUTER_KERNEL` is `off`, or the name of one kernel.
"""

import ctypes
import fcntl
import logging
import os
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from modelpool.checkpoint.cache_dir import cache_dir
from modelpool.checkpoint.cached_folder import cached_folder
from modelpool.kernels.compiler import FOLDER, NAME, compile_library, find_compiler, fingerprint

logger = logging.getLogger(__name__)

KERNELS: Mapping[str, int] = {
    "avx512-vnni": 4, "avx-vnni": 2, "avx2": 1, "neon": 8, "plain": 16
}  # fmt: skip
_SWITCH = "SPECROUTER_KERNEL"


class LayerWeight(ctypes.Structure):
    """The struct `Weight` of linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("nibbles", "fifths", "sixths", "bytes")),
        *(
            (name, ctypes.c_void_p)
            for name in ("scales", "centres", "steps", "bases", "units", "bias", "next")
        ),
        *((name, ctypes.c_int64) for name in ("inputs", "given", "outputs", "block")),
        *((name, ctypes.c_int64) for name in ("parts", "zero", "is_by_row")),
    )


@dataclass(frozen=True)
class LinearKernels:
    """Kernels of the library; `name` is the one in use, by default the best `available`."""

    library: ctypes.CDLL
    name: str
    available: tuple[str, ...]

    def multiply(
        self, weight: LayerWeight, x: Tensor, y: Tensor, kernel: str | None = None
    ) -> None:
        """Map `x` [T, given] to `y` [T, outputs], both contiguous, in bfloat16 or float32."""
        failed = self.library.sr_linear(
            ctypes.byref(weight), x.data_ptr(), x.dtype is torch.bfloat16,
            y.data_ptr(), y.dtype is torch.bfloat16, len(x),
            torch.get_num_threads(), KERNELS[kernel or self.name],
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for {len(x)} rows of a linear layer")

    def pack(self, numbers: Tensor, bits: int, to: Sequence[Tensor]) -> None:
        """Pack `numbers` [out, in], contiguous uint8, into panels.

        `to` is memory for nibbles or bytes, and for the fifth and sixth bits if there are more than
        4.
        """
        outputs, given = numbers.shape
        memory = [one.data_ptr() for one in to] + [None] * (3 - len(to))
        self.library.sr_pack(numbers.data_ptr(), outputs, given, bits, *memory)


@cache
def c_library() -> ctypes.CDLL | None:
    """Return the library of this process, or None as the module explains."""
    if os.environ.get(_SWITCH, "") == "off":
        return None
    try:
        return opened(library_file())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning(
            "no C library: attention is slow, and texts may differ between batches: %s", error
        )
        return None


@cache
def linear_kernels() -> LinearKernels | None:
    """Return the kernels of this process, or None as the module explains."""
    library = c_library()
    if library is None:
        return None
    found = kernels_of(library)
    if found is None:
        logger.warning("this CPU has neither AVX2 nor Arm's dot products for int8 and int4")
        return None
    asked = os.environ.get(_SWITCH, "")
    if asked and asked not in found.available:
        logger.warning("%s=%s: this CPU has %s", _SWITCH, asked, ", ".join(found.available))
        return found
    return LinearKernels(library, asked or found.name, found.available)


def kernels_of(library: ctypes.CDLL) -> LinearKernels | None:
    """Return the kernels that this CPU supports, or None."""
    available = tuple(name for name, bit in KERNELS.items() if library.sr_kernels() & bit)
    return LinearKernels(library, available[0], available) if available else None


def library_file() -> Path:
    """Return the library's file, beside this one or in the cache, where it is compiled if missing.

    Raises `OSError`, `RuntimeError` without a compiler, and what `subprocess.run` raises.
    """
    packaged = FOLDER / NAME
    if packaged.exists():
        return packaged
    compiler = find_compiler()
    folder = cache_dir() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    made = folder / f"linear-{fingerprint(compiler)}"
    with _alone(folder):
        file = cached_folder(made, partial(compile_library, compiler)) / NAME
    _check_owner(made)
    _check_owner(file)
    return file


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Make other processes wait: compiling takes many seconds on all cores.

    They do not wait if the file system has no locks.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _check_owner(path: Path) -> None:
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(f"{path} can be written by others: remove it, or set SPECROUTER_CACHE")


def opened(file: Path) -> ctypes.CDLL:
    """Load the library; raise `OSError`, or `RuntimeError` if it is of another version."""
    library = ctypes.CDLL(str(file))
    if not hasattr(library, "sr_gumbel_at"):
        raise RuntimeError(f"{file} is of another version")
    pointer, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.sr_linear.argtypes = (pointer, pointer, number, pointer, number, whole, number, number)
    library.sr_pack.argtypes = (pointer, whole, whole, number, pointer, pointer, pointer)
    library.sr_pack.restype = library.sr_rows.restype = None
    library.sr_rows.argtypes = (pointer, pointer, whole, pointer)
    library.sr_unblock.argtypes = (*(number,) * 3, pointer, whole, *(pointer,) * 5)
    library.sr_pass.argtypes = (pointer,)
    library.sr_scan.argtypes, library.sr_scan.restype = (pointer,), None
    library.sr_advance.argtypes, library.sr_advance.restype = (*(pointer,) * 4, *(whole,) * 4), None
    library.sr_attend.argtypes = (*(pointer,) * 3, *(whole,) * 3, pointer, number, number)
    library.sr_gumbel.argtypes, library.sr_gumbel.restype = (pointer, whole, pointer), None
    library.sr_gumbel_at.argtypes = (pointer, pointer, whole, pointer)
    library.sr_gumbel_at.restype = None
    library.sr_choose.argtypes = (pointer, *(whole,) * 3, *(pointer,) * 4, number)
    library.sr_choose.restype = None
    library.sr_set_threads.argtypes = (pointer, pointer, pointer)
    library.sr_set_threads.restype = None
    _share_threads(library)
    return library


def _share_threads(library: ctypes.CDLL) -> None:
    """Let the library use the threads of torch's OpenMP: two pools would compete for the cores.

    It runs on one thread if these functions are not found.
    """
    process = ctypes.CDLL(None)
    try:
        found = [
            ctypes.cast(getattr(process, name), ctypes.c_void_p)
            for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        ]
    except AttributeError:
        return
    library.sr_set_threads(*found)
