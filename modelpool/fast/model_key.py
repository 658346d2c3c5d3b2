"""Keys under which measurements and comparisons of a model are cached."""

import hashlib
import json
import os
import platform
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from modelpool.attention.path_cpu import best_set
from modelpool.checkpoint.cache_dir import package_sources
from modelpool.kernels.library import c_library, linear_kernels

if TYPE_CHECKING:
    from modelpool.packed_model import PackedModel


def key_of(model: "PackedModel", path: Path, *others: Any) -> str:
    """Return a file name for all that a model's times depend on, and for `others`.

    `path` is the checkpoint's directory. The layers' classes show how weights were laid out.
    """
    config = path / "config.json"
    weights = [(file.name, file.stat()) for file in sorted(path.glob("*.safetensors"))]
    facts = {
        "config": config.read_text(encoding="utf-8") if config.is_file() else "",
        "weights": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in weights],
        "parameters": model.parameter_count,
        "layers": sorted(Counter(type(m).__name__ for m in model.model.modules()).items()),
        "devices": sorted(map(_device_name, model.layer_devices)),
        "device": _device_name(model.device),
        "dtype": str(model.dtype),
        "threads": getattr(model, "threads", None) or torch.get_num_threads(),
        "torch": torch.__version__,
        "attention": model.attention.name,
        **({"others": others} if others else {}),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9.-]', '_', path.name)}-{digest[:24]}"


def computing_facts() -> tuple[str | int | None, ...]:
    """Return all that bits of a forward on the CPU depend on beside the model and its settings.

    They include this package's sources: what was compared before a change is compared again.
    """
    kernels = linear_kernels()
    return (
        *(torch.__version__, transformers.__version__, package_sources(), cpu_name()),
        None if c_library() is None else best_set(),
        None if kernels is None else kernels.name,
        *(torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA")),
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type if device.type != "cpu" else cpu_name()


def cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
