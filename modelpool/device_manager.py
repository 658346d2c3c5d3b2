"""Placement of whole models on devices, largest first, with weights and KV accounted.

`place` is a pure function of the devices' memory and the models' demands. An accelerator is
preferred to the CPU. A model too large for one accelerator is spread over several; a drafter that
fits on none goes to the CPU, with a warning; the target goes there only on request. The KV store of
a model is allocated as a whole, on any device, at the place of its layers.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modelpool.checkpoint.footprint import ModelFootprint
from modelpool.container import ROOT, memory_limits
from modelpool.errors import ConfigError, DoesNotFitError

_HEADROOM = 0.05  # share of a device's memory: activations, workspaces, fragmentation
_GIB = 2**30


@dataclass(frozen=True)
class DeviceInfo:
    """A device and its free memory; `load` is the number of models that it already runs."""

    name: str
    free_bytes: int
    total_bytes: int
    load: int = 0

    @property
    def is_accelerator(self) -> bool:
        return not is_cpu(self.name)

    @property
    def usable_bytes(self) -> int:
        """Bytes that models may take."""
        return max(0, self.free_bytes - int(_HEADROOM * self.total_bytes))


def is_cpu(device: str) -> bool:
    """Return whether a device is the CPU, which tests divide into `cpu:0` and `cpu:1`."""
    return device.partition(":")[0] == "cpu"


@dataclass(frozen=True)
class Placement:
    """The place of a model: one device, or several.

    `max_memory` (the most bytes of weights per device) is set for a model that is spread with
    `accelerate`, which fills them in this order; `device` is then the first of them. `warning` says
    why a model is not at the expected place.
    """

    device: str
    max_memory: tuple[tuple[str, int], ...] = ()
    warning: str | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.max_memory) or (self.device,)

    @property
    def is_on_cpu(self) -> bool:
        return is_cpu(self.device)


def place(
    models: Iterable[ModelFootprint],
    devices: Sequence[DeviceInfo],
    *,
    target: str,
    kv_tokens: int,
) -> dict[str, Placement]:
    """Return a place for each model: the target first, then the largest.

    Among the devices with room, the one with the most free memory is taken, then the least loaded.
    Raises `ConfigError` for a device that is not there, and for a target that fits nowhere.

    Args:
        models: demands of all members.
        devices: available devices.
        target: name of the target.
        kv_tokens: number of tokens for which each model's KV store has memory.
    """
    state = {device.name: device for device in devices}
    placements: dict[str, Placement] = {}
    for model in sorted(models, key=lambda m: (m.name != target, -m.total_bytes(kv_tokens))):
        placement = _place_one(model, state, model.name == target, kv_tokens)
        _charge(state, placement, model, kv_tokens)
        placements[model.name] = placement
    return placements


def bytes_by_device(placement: Placement, model: ModelFootprint, kv_tokens: int) -> dict[str, int]:
    """Return the bytes of weights and KV on each device; at most so many if a model is spread."""
    if not placement.max_memory:
        return {placement.device: model.total_bytes(kv_tokens)}
    taken, left = {}, model.weight_bytes
    for name, most in placement.max_memory:
        part = min(most, left)
        if part:
            taken[name] = model.part_bytes(part, kv_tokens)
        left -= part
    return taken


def read_devices() -> tuple[DeviceInfo, ...]:
    """Return this machine's accelerators and its CPU."""
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(DeviceInfo(f"cuda:{index}", free, total))
    return (*found, _read_cpu())


def _read_cpu(root: Path = ROOT) -> DeviceInfo:
    """Return the memory of the machine, or a container's part of it; `root` is for tests."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _available_bytes(root, total)
    for limit in memory_limits(root):
        total, free = min(total, limit.total_bytes), min(free, limit.free_bytes)
    return DeviceInfo("cpu", free, total)


def _available_bytes(root: Path, total: int) -> int:
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():  # unlike SC_AVPHYS_PAGES it counts the page cache as free, which it is
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total


def _place_one(
    model: ModelFootprint, state: Mapping[str, DeviceInfo], is_target: bool, kv_tokens: int
) -> Placement:
    need = model.total_bytes(kv_tokens)
    wanted = _wanted(model, state)
    fitting = [device for device in wanted if device.usable_bytes >= need]
    if fitting:
        best = max(fitting, key=lambda device: (device.usable_bytes, -device.load))
        return Placement(best.name)
    on_accelerator = any(device.is_accelerator for device in wanted)
    together = sum(device.usable_bytes for device in wanted)
    can_spread = on_accelerator and len(wanted) > 1
    if can_spread and together >= model.part_bytes(model.weight_bytes, kv_tokens):
        return _spread(model, wanted, kv_tokens)
    if is_target:
        remedy = "choose a smaller dtype, less KV (fewer or shorter requests), or say device: cpu"
        raise DoesNotFitError(
            f"{model.field}.device",
            f"the target {model.name!r} needs {_gib(need)} for weights and KV, and there is "
            f"{_room(wanted)}" + (f"; {remedy}" if on_accelerator else ""),
        )
    cpu, warning = next(device for device in state.values() if is_cpu(device.name)), None
    if on_accelerator:
        what = f"no room for {model.name!r} ({_gib(need)} for weights and KV)"
        warning = f"{what}: there is {_room(wanted)}; it runs on the CPU"
    if cpu.usable_bytes < need:
        there = f"{model.name!r} needs {_gib(need)} and there is {_room([cpu])}"
        warning = f"{there}: loading it may fail"
    return Placement(cpu.name, warning=warning)


def _wanted(model: ModelFootprint, state: Mapping[str, DeviceInfo]) -> list[DeviceInfo]:
    """Return the devices for a model: accelerators before the CPU, unless it asks for one."""
    accelerators = [device for device in state.values() if device.is_accelerator]
    on_cpu = [device for device in state.values() if not device.is_accelerator]
    if model.device == "auto":
        return accelerators or on_cpu
    if model.device == "cuda" and accelerators:
        return accelerators
    if model.device == "cpu":
        return on_cpu
    if model.device in state:
        return [state[model.device]]
    raise ConfigError(
        f"{model.field}.device",
        f"{model.device!r} is not available here; available: {', '.join(state)}",
    )


def _spread(model: ModelFootprint, devices: Sequence[DeviceInfo], kv_tokens: int) -> Placement:
    """Put on each device as many weights as fit there together with the KV of their layers.

    This ignores that a layer is not divided.
    """
    shares = [(d.name, model.part_within(d.usable_bytes, kv_tokens)) for d in devices]
    most = tuple(share for share in shares if share[1])
    return Placement(most[0][0], max_memory=most)


def _charge(
    state: dict[str, DeviceInfo], placement: Placement, model: ModelFootprint, kv_tokens: int
) -> None:
    for name, taken in bytes_by_device(placement, model, kv_tokens).items():
        device = state[name]
        state[name] = replace(
            device, free_bytes=max(0, device.free_bytes - taken), load=device.load + 1
        )


def _room(devices: Sequence[DeviceInfo]) -> str:
    return ", ".join(f"{_gib(device.usable_bytes)} on {device.name}" for device in devices)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
