"""PlacedMembers: where the pool's members run, in which dtype, and with which tuning.

Contract: every member has a place from the beginning. What `dtype: auto` means depends on a
member's place, and its place on its bytes: both are settled together, and again for a member that
its device has no memory for.
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
    """How a member will run: `threads` are CPU threads, None on an accelerator.

    `dtype` is what it computes in, `attention` the kernels that attend, `weights` how its linear
    layers keep theirs; `warning` what one should know of it. `read_bytes`: of weights, for one
    token, where that is known; `int8_read_bytes`, `int4_read_bytes`: those in so few bits, where
    that can be had; `is_recurrent`: some layers keep states.
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
    """By name, those that have a model."""

    def __init__(
        self,
        config: PoolConfig,
        members: dict[str, Member],
        devices: Sequence[DeviceInfo],
        kv: KVMemory | int = 0,
    ) -> None:
        """`kv`: tokens that each model's store has memory for, or what all of them take."""
        self._config = config
        self._members = members
        self._devices = devices
        self._threads = torch.get_num_threads()  # now: a forward may change it for its own time
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
        """Where a model is, or will be loaded."""
        return self._placements[name]

    def plan(self, name: str) -> MemberPlan:
        """What a model takes, and how it will run, once it is loaded where it is placed."""
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
        """How a model is run where it is placed."""
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
        """Weights, and the KV memory that its place must have room for."""
        return self._members[name].footprint.total_bytes(self.kv_tokens)

    def move_to_cpu(self, name: str) -> None:
        """Raises `PoolFullError` where it has no room there either."""
        before = self._members[name], self._placements[name]
        self._placements[name] = Placement("cpu")
        self._pack(name)
        on_cpu = [other for other in self._members if self._placements[other].is_on_cpu]
        self._settle_on_cpu(name, on_cpu)
        if not self._fit_on_cpu(on_cpu):
            self._members[name], self._placements[name] = before
            raise PoolFullError(f"no room to load {name}: neither on its device nor on the CPU")

    def where(self, name: str) -> str:
        """The devices of a model, for a message."""
        return ", ".join(self._placements[name].devices)

    def _placed(self) -> dict[str, Placement]:
        footprints, target = [one.footprint for one in self._members.values()], self._config.target
        return place(footprints, self._devices, target=target, kv_tokens=self.kv_tokens)

    def _settle_kv(self, kv_memory: KVMemory) -> None:
        """How many tokens fit depends on the members' dtypes, these on what fits on the CPU."""
        totals = {device.name: device.total_bytes for device in self._devices}
        for _ in range(2):
            self._settle_dtypes()
            facts = [member.facts for member in self._members.values()]
            per_token = sum(one.kv_bytes_per_token for one in facts)
            longest = min(one.max_positions for one in facts)
            device_bytes = totals[self._placed()[self._config.target].device]
            self.kv_tokens = kv_memory.tokens(per_token, device_bytes, longest)

    def _settle_dtypes(self) -> dict[str, str]:
        """What `dtype: auto` means depends on a member's place, its place on its bytes.

        Returns why members are on the CPU that asked for no place: they ask for it from here on.
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
        """`warnings`: of the placement before dtypes were settled."""
        placements = self._placed()
        for name, placement in placements.items():
            warning = placement.warning or warnings.get(name)
            if warning is not None:
                logger.warning(warning)
                placements[name] = replace(placement, warning=warning)
        return placements

    def _pack(self, name: str) -> None:
        """Counts the copy that a packed head is, of a member that is placed on the CPU."""
        member = self._members[name]
        is_target = name == self._config.target
        if self._config.pack_weights or is_lean(member.facts, is_target=is_target, on_cpu=True):
            self._members[name] = member.packed()

    def _settle_on_cpu(self, name: str, on_cpu: Sequence[str]) -> None:
        """`on_cpu`: the members that share the CPU's memory."""
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
        """Have those of them that may be loaded together room there?"""
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
        """What to say of a member whose weights should be quantised, and cannot be."""
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
        """What to say of a member on the CPU in a dtype that this has no kernels for."""
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
        """Raises `ConfigError` for kernels that a member cannot run on where it is placed."""
        asked, field = self._asked_attention(name)
        reason = refusal_of(asked, self._attention_place(name))
        if reason is not None:
            raise ConfigError(field, f"{name!r}: {reason}")

    def _check_twin(self, name: str) -> None:
        """Raises `ConfigError` for a twin that would not be one, or that nothing computes."""
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
        """Raises `ConfigError` for quantised weights where nothing computes with them."""
        member, placement = self._members[name], self._placements[name]
        field, asked, kept = f"{member.field}.weights", member.config.weights, member.facts.weights
        if member.facts.is_quantized and asked != "auto":
            reason = "the checkpoint is quantised already, by a method that transformers runs"
            raise ConfigError(field, reason)
        if member.facts.stored == "int8" and asked == "int4":
            raise ConfigError(field, "the checkpoint is in int8 already")
        if kept == "plain" and member.facts.stored == "int8":
            kept = "int8"  # read by this CPU, though it is kept plain
        if kept != "plain" and not placement.is_on_cpu:
            where = self.where(name)
            reason = f"{kept} has no kernels on {where}, where {name!r} is placed; set device: cpu"
            raise ConfigError(field, reason + (" or weights: auto" if asked != "auto" else ""))

    def _can_quantise(self, name: str) -> bool:
        """Could its weights be quantised, or are they?"""
        is_foreign = self._members[name].facts.is_quantized
        on_cpu = self._placements[name].is_on_cpu
        return on_cpu and not is_foreign and quantised_refusal() is None

    def _asked_attention(self, name: str) -> tuple[AttentionName, str]:
        """What is asked for, and the key that asks."""
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
