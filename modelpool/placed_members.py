"""PlacedMembers: the devices, dtypes and tunings of the pool's members.

Contract: every member has a place from the beginning. The meaning of `dtype: auto` depends on a
member's place, and its place on its bytes: both are settled together, and again for a member for
which its device has no memory.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from modelpool.attention.backend import (
    PATH,
    AttentionBackend,
    AttentionName,
    AttentionPlace,
    backend_for,
    refusal_of,
)
from modelpool.checkpoint.footprint import ModelFootprint
from modelpool.checkpoint.quantization import KEPT_PLAIN, UNPACKED
from modelpool.config import KeptWeights, PoolConfig
from modelpool.device_manager import DeviceInfo, Placement, is_cpu, place
from modelpool.errors import ConfigError, PoolFullError
from modelpool.fast.cpu import computes_in
from modelpool.fast.panels import quantised_refusal
from modelpool.fast.thread_choice import OtherPrograms
from modelpool.fast.tuning import Tuning, dtype_for, is_lean, tuning_for
from modelpool.kv_memory import KVMemory
from modelpool.member import Member

logger = logging.getLogger(__name__)

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class MemberPlan:
    """Plan of how a member will run: `threads` are CPU threads, None on an accelerator.

    It computes in `dtype`, attends with `attention`, and keeps its linear layers in the form
    `weights`; `warning` is for the user. `read_bytes`: bytes of weights read for one token, if
    known; `int8_read_bytes`, `int4_read_bytes`: the same with weights in so few bits, if possible;
    `is_recurrent`: some layers keep states.
    """

    footprint: ModelFootprint
    placement: Placement
    dtype: str
    threads: int | None
    attention: AttentionBackend = PATH
    warning: str | None = None
    weights: KeptWeights = "plain"
    read_bytes: int | None = None
    int8_read_bytes: int | None = None
    int4_read_bytes: int | None = None
    is_recurrent: bool = False


class PlacedMembers:
    """Members that have a model, by name."""

    def __init__(
        self,
        config: PoolConfig,
        members: dict[str, Member],
        devices: Sequence[DeviceInfo],
        kv: KVMemory | int = 0,
    ) -> None:
        """Place the members.

        `kv`: tokens for which each model's store has memory, or the memory of all stores.
        """
        self._config = config
        self._members = members
        self._devices = devices
        self._threads = torch.get_num_threads()  # read now: a forward may change it for a while
        self._others = OtherPrograms()
        self.kv_tokens = 0 if isinstance(kv, KVMemory) else kv
        if isinstance(kv, KVMemory):
            self._settle_kv(kv)
        self._placements = self._placed_as_warned(self._settle_dtypes())
        for name in members:
            self._check_attention(name)
            self._check_twin(name)
            self._check_weights(name)

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def placement(self, name: str) -> Placement:
        """Return where a model is, or will be loaded."""
        return self._placements[name]

    def plan(self, name: str) -> MemberPlan:
        """Return what a model takes, and how it will run, once it is loaded at its place."""
        member, placement = self._members[name], self._placements[name]
        tuning = self.tuning(name)
        return MemberPlan(
            footprint=member.footprint,
            placement=placement,
            dtype=member.facts.dtype,
            threads=tuning.threads if placement.is_on_cpu else None,
            attention=tuning.attention,
            warning=self._warning(name, placement.is_on_cpu),
            weights=member.facts.weights,
            read_bytes=member.facts.read_bytes,
            is_recurrent=member.facts.state_bytes > 0,
            int8_read_bytes=member.facts.int8_read_bytes if self._can_quantise(name) else None,
            int4_read_bytes=member.facts.int4_read_bytes if self._can_quantise(name) else None,
        )

    def tuning(self, name: str) -> Tuning:
        """Return how a model runs at its place."""
        on_cpu = self._placements[name].is_on_cpu
        asked, _ = self._asked_attention(name)
        return tuning_for(
            self._members[name].config,
            self._members[name].facts,
            is_target=name == self._config.target,
            on_cpu=on_cpu,
            default_threads=self._threads,
            pack_weights=self._config.pack_weights,
            attention=backend_for(asked, self._attention_place(name)),
            others=self._others,
        )

    def bytes_of(self, name: str) -> int:
        """Return the bytes of the weights and the KV for which its place must have room."""
        return self._members[name].footprint.total_bytes(self.kv_tokens)

    def move_to_cpu(self, name: str) -> None:
        """Move a model to the CPU; raise `PoolFullError` if the CPU has no room either."""
        before = self._members[name], self._placements[name]
        self._placements[name] = Placement("cpu")
        self._pack(name)
        on_cpu = [other for other in self._members if self._placements[other].is_on_cpu]
        self._settle_on_cpu(name, on_cpu)
        if not self._fit_on_cpu(on_cpu):
            self._members[name], self._placements[name] = before
            raise PoolFullError(f"no room to load {name}: neither on its device nor on the CPU")

    def where(self, name: str) -> str:
        """Return the devices of a model, for a message."""
        return ", ".join(self._placements[name].devices)

    def _placed(self) -> dict[str, Placement]:
        footprints, target = [one.footprint for one in self._members.values()], self._config.target
        return place(footprints, self._devices, target=target, kv_tokens=self.kv_tokens)

    def _settle_kv(self, kv_memory: KVMemory) -> None:
        """Settle the number of KV tokens; it depends on dtypes, and these on the CPU's memory."""
        totals = {device.name: device.total_bytes for device in self._devices}
        for _ in range(2):
            self._settle_dtypes()
            facts = [member.facts for member in self._members.values()]
            per_token = sum(one.kv_bytes_per_token for one in facts)
            longest = min(one.max_positions for one in facts)
            device_bytes = totals[self._placed()[self._config.target].device]
            self.kv_tokens = kv_memory.tokens(per_token, device_bytes, longest)

    def _settle_dtypes(self) -> dict[str, str]:
        """Settle `dtype: auto`, which depends on a member's place, as the place does on its bytes.

        Returns why members that asked for no place are on the CPU: they ask for it from here on.
        """
        placements = self._placed()
        on_cpu = [name for name, placement in placements.items() if placement.is_on_cpu]
        for name in on_cpu:
            self._pack(name)
        for name in on_cpu:
            self._settle_on_cpu(name, on_cpu)
        warnings = {name: placements[name].warning for name in on_cpu}
        return {name: warning for name, warning in warnings.items() if warning is not None}

    def _placed_as_warned(self, warnings: Mapping[str, str]) -> dict[str, Placement]:
        """Place the members; `warnings` are from the placement before dtypes were settled."""
        placements = self._placed()
        for name, placement in placements.items():
            warning = placement.warning or warnings.get(name)
            if warning is not None:
                logger.warning(warning)
                placements[name] = replace(placement, warning=warning)
        return placements

    def _pack(self, name: str) -> None:
        """Count the copy that a packed head is, for a member that is placed on the CPU."""
        member = self._members[name]
        is_target = name == self._config.target
        if self._config.pack_weights or is_lean(member.facts, is_target=is_target, on_cpu=True):
            self._members[name] = member.packed()

    def _settle_on_cpu(self, name: str, on_cpu: Sequence[str]) -> None:
        """Settle the dtype of a member; those of `on_cpu` share the CPU's memory."""
        member = self._members[name]
        is_target = name == self._config.target
        dtype = dtype_for(member.config, member.facts, is_target, computes_in)
        if dtype != member.config.dtype:
            self._members[name] = member.on_cpu(dtype)
            if not self._fit_on_cpu(on_cpu):
                self._members[name] = member
        warning = self._warning(name, on_cpu=True)
        if warning is not None:
            logger.warning(warning)

    def _fit_on_cpu(self, names: Sequence[str]) -> bool:
        """Return whether the CPU has room for all of them that may be loaded together."""
        others = sorted(
            (self.bytes_of(name) for name in names if name != self._config.target), reverse=True
        )
        most = self._config.max_loaded_models
        together = sum(others if most is None else others[: most - 1])
        if self._config.target in names:
            together += self.bytes_of(self._config.target)
        room = next(d.usable_bytes for d in self._devices if is_cpu(d.name))
        if self._config.memory_limit_mb is not None:
            room = min(room, self._config.memory_limit_mb * _MIB)
        return together <= room

    def _warning(self, name: str, on_cpu: bool) -> str | None:
        said = [self._dequantised(name)]
        if on_cpu:
            said += [self._emulation(name), self._kept_plain(name), self._plain_experts(name)]
        return "; ".join(filter(None, said)) or None

    def _dequantised(self, name: str) -> str | None:
        member, facts = self._members[name], self._members[name].facts
        if facts.stored not in UNPACKED:
            return None
        is_exact = member.config.weights == "exact" and facts.has_blocks
        how = "as they are" if is_exact else f"rounded again, to {facts.weights}"
        how = f"kept in {facts.dtype}" if facts.weights == "plain" else how
        weights = f"its {UNPACKED[facts.stored]} weights"
        size = f"{facts.weight_bytes / 1e9:.1f} GB in all"
        return f"{member.field}.source: {weights} are {how}, {size}"

    def _kept_plain(self, name: str) -> str | None:
        """Return a warning about a member whose weights should be quantised, and cannot be."""
        member, reason = self._members[name], quantised_refusal()
        asks = member.config.weights != "auto" or member.facts.stored == "int8"
        if reason is None or not asks or member.facts.weights != "plain":
            return None
        return f"{member.field}.weights: {reason}: {name!r} keeps them in {member.facts.dtype}"

    def _plain_experts(self, name: str) -> str | None:
        member, facts = self._members[name], self._members[name].facts
        if facts.weights == "plain" or not facts.has_plain_experts:
            return None
        reason = "their form cannot be quantised"
        return f"{member.field}.weights: {name!r} keeps its experts in {facts.dtype}: {reason}"

    def _emulation(self, name: str) -> str | None:
        """Return a warning about a member on the CPU in a dtype for which it has no kernels."""
        member = self._members[name]
        dtype = member.facts.dtype
        if member.facts.is_quantized or computes_in(dtype):
            return None
        is_asked_for = member.config.dtype != "auto"
        remedy = (
            "leave dtype at auto" if is_asked_for else "float32 needs more memory than there is"
        )
        return (
            f"{member.field}.dtype: this CPU has no kernels for {dtype}, in which {name!r} is many "
            f"times slower than in float32; {remedy}"
        )

    def _check_attention(self, name: str) -> None:
        """Raise `ConfigError` for kernels on which a member cannot run at its place."""
        asked, field = self._asked_attention(name)
        reason = refusal_of(asked, self._attention_place(name))
        if reason is not None:
            raise ConfigError(field, f"{name!r}: {reason}")

    def _check_twin(self, name: str) -> None:
        """Raise `ConfigError` for a twin that saves no bits, or for which there are no kernels."""
        if name != self._config.twin:
            return
        member, target = self._members[name], self._config.target
        reason = quantised_refusal() if member.facts.weights == "plain" else None
        own = self._members[target].facts
        is_as_small = own.weights != "plain" and own.weights in ("int4", member.facts.weights)
        if own.stored not in KEPT_PLAIN or is_as_small:
            reason = f"the checkpoint of {target!r} is quantised already"
        if reason is not None:
            raise ConfigError(f"{member.field}.source", f"{reason}: {target!r} can have no twin")
        if not self._placements[name].is_on_cpu:
            weights = member.facts.weights
            reason = f"{weights} has no kernels on {self.where(name)}: a twin runs on the CPU"
            raise ConfigError(f"{member.field}.device", reason)

    def _check_weights(self, name: str) -> None:
        """Raise `ConfigError` for quantised weights for which there are no kernels."""
        member, placement = self._members[name], self._placements[name]
        field, asked, kept = f"{member.field}.weights", member.config.weights, member.facts.weights
        if member.facts.is_quantized and asked != "auto":
            reason = "the checkpoint is quantised already, by a method that transformers runs"
            raise ConfigError(field, reason)
        if member.facts.stored == "int8" and asked == "int4":
            raise ConfigError(field, "the checkpoint is in int8 already")
        if kept == "plain" and member.facts.stored == "int8":
            kept = "int8"  # the form in the file, though this CPU keeps it plain
        if kept != "plain" and not placement.is_on_cpu:
            where = self.where(name)
            reason = f"{kept} has no kernels on {where}, where {name!r} is placed; set device: cpu"
            raise ConfigError(field, reason + (" or weights: auto" if asked != "auto" else ""))

    def _can_quantise(self, name: str) -> bool:
        """Return whether its weights are quantised, or could be."""
        is_foreign = self._members[name].facts.is_quantized
        on_cpu = self._placements[name].is_on_cpu
        return on_cpu and not is_foreign and quantised_refusal() is None

    def _asked_attention(self, name: str) -> tuple[AttentionName, str]:
        """Return the attention that is asked for, and the key that asks for it."""
        member = self._members[name]
        if member.config.attention is None:
            return self._config.attention, "pool.attention"
        return member.config.attention, f"{member.field}.attention"

    def _attention_place(self, name: str) -> AttentionPlace:
        facts = self._members[name].facts
        placement = self._placements[name]
        device = "cpu" if placement.is_on_cpu else placement.device
        is_tried = len(placement.devices) == 1 and not _is_before_ampere(device)
        return AttentionPlace(device, facts.dtype, facts.head_dims, facts.features, is_tried)


def _is_before_ampere(device: str) -> bool:
    is_cuda = torch.cuda.is_available() and device.startswith("cuda")
    return is_cuda and torch.cuda.get_device_capability(device) < (8, 0)
