"""The models that requests may be routed through, loaded on first use.

Contract: at construction every source is resolved, every tokenizer compared, every model
placed; what is wrong raises `ConfigError` with the field's name. No weights are read. `get` loads
on first use, once, whatever the number of threads. Under a limit the least recently used model
that nobody holds is evicted; the target, pinned models and models in use never are.

A model stays in memory as long as somebody holds it: hold it between `acquire` and `release`.
A weightless member (`source: ngram`) has a name and no model: it is always there, takes no place
or memory, counts for no limit, and cannot be acquired.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from modelpool.checkpoint.architecture import refusal
from modelpool.checkpoint.footprint import (
    CheckpointFacts,
    Header,
    ModelFootprint,
    read_checkpoint,
    read_config,
)
from modelpool.checkpoint.source import resolve_headers, resolve_source
from modelpool.checkpoint.tokenizers import files_fingerprint, load_tokenizer, tokenizer_difference
from modelpool.config import ModelConfig, PoolConfig, validate_config
from modelpool.device_manager import DeviceInfo, DeviceManager, Placement, place
from modelpool.errors import ConfigError, PoolFullError, UnsupportedModelError
from modelpool.fast.cpu import computes_in
from modelpool.fast.tuning import Role, Tuning, dtype_for, tuning_for
from modelpool.inflate.inflated import inflated_source

if TYPE_CHECKING:
    from modelpool.packed_model import PackedModel

logger = logging.getLogger(__name__)

_MIB = 2**20
_UNLIMITED = 2**31  # tokens


@dataclass(frozen=True)
class _Member:
    config: ModelConfig
    field: str  # its place in the configuration, such as pool.models[1]
    path: Path
    facts: CheckpointFacts
    headers: Sequence[Header] | None = None  # of weights that were not fetched


@dataclass(frozen=True)
class MemberPlan:
    """How a member will run: `threads` are CPU threads, None on an accelerator.

    `dtype` is what it computes in; `warning` what one should know of it.
    """

    footprint: ModelFootprint
    placement: Placement
    dtype: str
    threads: int | None
    warning: str | None = None


# How many tokens of KV each loaded model takes, where sequences have at most so many tokens.
KVTokens = Callable[[int], int]
Loader = Callable[[ModelConfig, Path, Placement, int, str, Tuning], "PackedModel"]


def _no_kv(longest: int) -> int:
    return 0


class ModelPool:
    """See the module. Thread-safe."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        kv_tokens: KVTokens = _no_kv,
        devices: Sequence[DeviceInfo] | None = None,
        loader: Loader | None = None,
        headers_only: bool = False,
    ) -> None:
        """
        Args:
            kv_tokens: tokens of KV that each model's place must have room for, a function of
                `longest_sequence`.
            devices: what to place on; by default this machine's devices.
            loader: `modelpool.loader.load_model`, or a stand-in for it.
            headers_only: weights are not downloaded but to be inflated, and nothing can be loaded.
        """
        self.config = config
        self.target = config.target
        self._members = {
            model.name: _open(model, f"pool.models[{index}]", headers_only)
            for index, model in enumerate(config.models)
            if not model.is_weightless
        }
        self._weightless = tuple(model.name for model in config.models if model.is_weightless)
        self.names = (*self._weightless, *_weakest_first(self._members, config.target))
        target = self._members[config.target]
        self.tokenizer: PreTrainedTokenizerBase = _tokenizer(target)
        self.vocab_size = len(self.tokenizer)
        _check_tokenizers(self._members, config.target, self.tokenizer)
        self.device_manager = DeviceManager(devices, kv_tokens=kv_tokens(self.longest_sequence))
        self._placements = self._place(self._settle_dtypes())
        self._loader = loader
        self._threads = torch.get_num_threads()  # now: a forward may change it for its own time
        self._loading = threading.Lock()  # one model at a time: loading is not reentrant
        self._lock = threading.Lock()  # guards the two below
        self._loaded: OrderedDict[str, PackedModel] = OrderedDict()  # least recently used first
        self._uses: Counter[str] = Counter()

    @classmethod
    def from_config(
        cls, config: PoolConfig | Mapping[str, Any], *, kv_tokens: KVTokens = _no_kv
    ) -> "ModelPool":
        """A pool from the `pool:` section of a configuration. Raises `ConfigError`."""
        return cls(validate_config(PoolConfig, config, "pool"), kv_tokens=kv_tokens)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a text of the target, as `generate` would have it."""
        found = self._members[self.target].facts.eos_token_ids
        if found or self.tokenizer.eos_token_id is None:
            return found
        return frozenset([int(self.tokenizer.eos_token_id)])

    def is_weightless(self, name: str) -> bool:
        """The member has no model: it can only draft, from the text itself."""
        return name in self._weightless

    def path(self, name: str) -> Path:
        """The directory of a model's checkpoint, for `transformers`."""
        return self._member(name).path

    def parameter_count(self, name: str) -> int:
        """0 for a weightless member."""
        return 0 if self.is_weightless(name) else self._member(name).facts.parameter_count

    def max_positions(self, name: str) -> int:
        """The longest sequence that a model can be used at, in tokens."""
        return _UNLIMITED if self.is_weightless(name) else self._member(name).facts.max_positions

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a sequence that every model can be used at."""
        return min(member.facts.max_positions for member in self._members.values())

    def placement(self, name: str) -> Placement:
        """Where a model is, or will be loaded."""
        return self._placements[self._member(name).config.name]

    def plan(self, name: str) -> "MemberPlan":
        """What a model takes, and how it will run, once it is loaded where it is placed."""
        member, placement = self._member(name), self.placement(name)
        tuning = self._tuning(member, placement)
        return MemberPlan(
            footprint=member.facts.footprint(name, member.field, member.config.device),
            placement=placement,
            dtype=member.facts.dtype,
            threads=tuning.threads if placement.device == "cpu" else None,
            warning=self._emulation(name) if placement.device == "cpu" else None,
        )

    def is_loaded(self, name: str) -> bool:
        """Can it be used without loading anything?"""
        with self._lock:
            return name in self._loaded or self.is_weightless(name)

    def has_room(self, name: str) -> bool:
        """Could it be loaded, or is it, without evicting another model?"""
        with self._lock:
            is_here = name in self._loaded or self.is_weightless(name)
            return is_here or not self._is_full_for(name)

    def fit_together(self, names: Iterable[str]) -> bool:
        """Could they be in memory at once, beside the target and the pinned models?"""
        asked = {name for name in names if not self.is_weightless(name)} - {self.target}
        if not asked:  # the target is always let in
            return True
        kept = {name for name, member in self._members.items() if member.config.pinned}
        together = asked | kept | {self.target}
        limit, memory = self.config.max_loaded_models, self.config.memory_limit_mb
        if limit is not None and len(together) > limit:
            return False
        return memory is None or sum(map(self._bytes, together)) <= memory * _MIB

    def get(self, name: str) -> "PackedModel":
        """A model, loaded if it is not.

        Raises `KeyError` for a name that is not in the pool, `ValueError` for a weightless
        member, `UnsupportedModelError` for an architecture that the plug-in refuses, `ConfigError`
        for weights that cannot be read or a target that its device has no memory for, and
        `PoolFullError` where the pool's limits leave no room.
        """
        return self._get(name, hold=False)

    def acquire(self, name: str) -> "PackedModel":
        """`get`, and the model is not evicted until it is released as often as acquired."""
        return self._get(name, hold=True)

    def release(self, name: str) -> None:
        """Ends one `acquire`."""
        with self._lock:
            assert self._uses[name] > 0, f"{name} is released more often than acquired"
            self._uses[name] -= 1

    def evict(self, name: str) -> bool:
        """Drops an idle model's weights; False where it is not loaded, in use, or kept."""
        with self._lock:
            if name not in self._loaded or not self._may_evict(name):
                return False
            self._drop(name)
            return True

    def make_room(self, name: str) -> None:
        """Evicts models, the least recently used first, until `name` fits; or `PoolFullError`.

        For callers who hold memory of evicted models to let go of before `name` is loaded.
        """
        self._member(name)
        with self._lock:
            if name not in self._loaded:
                self._make_room(name)

    def check_architectures(self) -> None:
        """Raises `UnsupportedModelError` for a member that could not be served once loaded.

        Apart from the construction, because it imports the members' modelling code.
        """
        for member in self._members.values():
            reason = refusal(read_config(member.path, member.config.trust_remote_code))
            if reason is not None:
                raise UnsupportedModelError(f"{member.field}.source", reason)

    def _footprints(self) -> list[ModelFootprint]:
        return [
            member.facts.footprint(name, member.field, member.config.device)
            for name, member in self._members.items()
        ]

    def _settle_dtypes(self) -> dict[str, str]:
        """What `dtype: auto` means depends on a member's place, its place on its bytes.

        Returns why members are on the CPU that asked for no place: they ask for it from here on.
        """
        placements = place(
            self._footprints(),
            self.device_manager.devices,
            target=self.target,
            kv_tokens=self.device_manager.kv_tokens,
        )
        on_cpu = [name for name, placement in placements.items() if placement.device == "cpu"]
        for name in on_cpu:
            self._settle_on_cpu(name, on_cpu)
        warnings = {name: placements[name].warning for name in on_cpu}
        return {name: warning for name, warning in warnings.items() if warning is not None}

    def _place(self, warnings: Mapping[str, str]) -> dict[str, Placement]:
        """`warnings`: of the placement before dtypes were settled."""
        placements = self.device_manager.place(self._footprints(), self.target)
        for name, warning in warnings.items():
            if placements[name].warning is None:
                logger.warning(warning)
                placements[name] = replace(placements[name], warning=warning)
        return placements

    def _settle_on_cpu(self, name: str, on_cpu: Sequence[str]) -> None:
        """`on_cpu`: the members that share the CPU's memory."""
        member = self._members[name]
        dtype = dtype_for(member.config, self._role(name, on_cpu=True), computes_in)
        if dtype != member.config.dtype:
            config = member.config.model_copy(update={"dtype": dtype, "device": "cpu"})
            facts = _read_facts(config, member.path, member.field, member.headers)
            self._members[name] = replace(member, config=config, facts=facts)
            if not self._fit_on_cpu(on_cpu):
                self._members[name] = member
        emulation = self._emulation(name)
        if emulation is not None:
            logger.warning(emulation)

    def _fit_on_cpu(self, names: Sequence[str]) -> bool:
        """Have those of them that may be loaded together room there?"""
        others = sorted((self._bytes(name) for name in names if name != self.target), reverse=True)
        most = self.config.max_loaded_models
        together = sum(others if most is None else others[: most - 1])
        if self.target in names:
            together += self._bytes(self.target)
        room = next(d.usable_bytes for d in self.device_manager.devices if d.name == "cpu")
        if self.config.memory_limit_mb is not None:
            room = min(room, self.config.memory_limit_mb * _MIB)
        return together <= room

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

    def _role(self, name: str, on_cpu: bool) -> Role:
        facts = self._members[name].facts
        is_target = name == self.target
        return Role(facts.parameter_count, facts.dtype, facts.is_quantized, is_target, on_cpu)

    def _member(self, name: str) -> _Member:
        if self.is_weightless(name):
            raise ValueError(f"{name!r} has no model: it drafts from the text itself")
        return self._members[name]

    def _get(self, name: str, hold: bool) -> "PackedModel":
        member = self._member(name)
        model = self._touch(name, hold)
        if model is not None:
            return model
        with self._loading:
            model = self._touch(name, hold)  # another thread may have loaded it meanwhile
            if model is not None:
                return model
            self.make_room(name)
            model = self._load(member)
            with self._lock:
                self._loaded[name] = model
                self._uses[name] += hold
            return model

    def _touch(self, name: str, hold: bool) -> "PackedModel | None":
        with self._lock:
            model = self._loaded.get(name)
            if model is not None:
                self._loaded.move_to_end(name)
                self._uses[name] += hold
            return model

    def _load(self, member: _Member) -> "PackedModel":
        name = member.config.name
        try:
            return self._load_at(member, self._placements[name])
        except torch.OutOfMemoryError as error:
            if name == self.target:
                reason = f"no memory for the target {name!r} on {self._where(name)}: {error}"
                raise ConfigError(f"{member.field}.device", reason) from error
            logger.warning("no memory for %s on %s: it goes to the CPU", name, self._where(name))
        torch.cuda.empty_cache()
        self._move_to_cpu(name)
        return self._load_at(self._members[name], self._placements[name])

    def _move_to_cpu(self, name: str) -> None:
        """Raises `PoolFullError` where it has no room there either."""
        before = self._members[name], self._placements[name]
        self._placements[name] = Placement("cpu")
        on_cpu = [other for other in self._members if self._placements[other].device == "cpu"]
        self._settle_on_cpu(name, on_cpu)
        if not self._fit_on_cpu(on_cpu):
            self._members[name], self._placements[name] = before
            raise PoolFullError(f"no room to load {name}: neither on its device nor on the CPU")

    def _load_at(self, member: _Member, placement: Placement) -> "PackedModel":
        loader = self._loader or _default_loader()
        tuning = self._tuning(member, placement)
        return loader(member.config, member.path, placement, self.vocab_size, member.field, tuning)

    def _tuning(self, member: _Member, placement: Placement) -> Tuning:
        return tuning_for(
            member.config,
            self._role(member.config.name, on_cpu=placement.device == "cpu"),
            default_threads=self._threads,
            pack_weights=self.config.pack_weights,
        )

    def _where(self, name: str) -> str:
        placement = self._placements[name]
        return ", ".join(dict(placement.max_memory)) or placement.device

    def _make_room(self, name: str) -> None:
        """Evicts until `name` fits, least recently used first. The target is always let in."""
        while self._is_full_for(name):
            idle = next((other for other in self._loaded if self._may_evict(other)), None)
            if idle is not None:
                self._drop(idle)
            elif name == self.target:
                return
            else:
                loaded = ", ".join(self._loaded)
                raise PoolFullError(f"no room to load {name}: in use or pinned are {loaded}")

    def _is_full_for(self, name: str) -> bool:
        limit, memory = self.config.max_loaded_models, self.config.memory_limit_mb
        if limit is not None and len(self._loaded) + 1 > limit:
            return True
        wanted = sum(self._bytes(other) for other in (*self._loaded, name))
        return memory is not None and wanted > memory * _MIB

    def _bytes(self, name: str) -> int:
        member = self._members[name]
        footprint = member.facts.footprint(name, member.field, member.config.device)
        return footprint.total_bytes(self.device_manager.kv_tokens)

    def _may_evict(self, name: str) -> bool:
        kept = name == self.target or self._members[name].config.pinned
        return not kept and self._uses[name] == 0

    def _drop(self, name: str) -> None:
        del self._loaded[name]
        logger.info("evicted %s", name)


def _default_loader() -> Loader:
    # Imported here, because it imports transformers' modelling code: seconds that an error of
    # the configuration should not wait for.
    from modelpool.loader import load_model

    return load_model


def _open(config: ModelConfig, field: str, headers_only: bool) -> _Member:
    headers: Sequence[Header] | None = None
    source, revision, remote_code = config.source, config.revision, config.trust_remote_code
    if headers_only and config.inflate_to is None:
        path, headers = resolve_headers(
            source, field=field, revision=revision, remote_code=remote_code
        )
    else:
        path = resolve_source(source, field=field, revision=revision, remote_code=remote_code)
    if config.inflate_to is not None:
        path = inflated_source(path, config.inflate_to, dtype=config.dtype, field=field)
    return _Member(config, field, path, _read_facts(config, path, field, headers), headers)


def _read_facts(
    config: ModelConfig, path: Path, field: str, headers: Sequence[Header] | None
) -> CheckpointFacts:
    return read_checkpoint(
        path,
        field=field,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        headers=headers,
    )


def _weakest_first(members: Mapping[str, _Member], target: str) -> tuple[str, ...]:
    """By parameters, the target last; equal ones in the order of the configuration."""
    return tuple(
        sorted(members, key=lambda name: (name == target, members[name].facts.parameter_count))
    )


def _tokenizer(member: _Member) -> PreTrainedTokenizerBase:
    return load_tokenizer(
        member.path, field=member.field, trust_remote_code=member.config.trust_remote_code
    )


def _check_tokenizers(
    members: Mapping[str, _Member], target: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """All members read text as the target does, and know each of its ids."""
    equal = {files_fingerprint(members[target].path)}
    for name, member in members.items():
        fingerprint = files_fingerprint(member.path)
        if fingerprint not in equal:
            difference = tokenizer_difference(tokenizer, _tokenizer(member))
            if difference is not None:
                raise ConfigError(
                    f"{member.field}.source",
                    f"the tokenizer of {name!r} is not that of the target {target!r}: "
                    f"{difference}; a pool shares one tokenizer",
                )
            equal.add(fingerprint)
        if member.facts.vocab_rows < len(tokenizer):
            raise ConfigError(
                f"{member.field}.source",
                f"{name!r} embeds {member.facts.vocab_rows} ids, and the tokenizer of "
                f"{target!r} has {len(tokenizer)}",
            )
