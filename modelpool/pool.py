"""The models through which requests may be routed, loaded on first use.

Contract: at construction every source is resolved, every tokenizer compared, every model placed; a
fault raises `ConfigError` with the field's name. No weights are read. A drafter that cannot be
served is left out, with a warning, if another one remains. `get` loads on first use, once, for any
number of threads. Under a limit the least recently used model that is not held is evicted; the
target, pinned models and models in use never are.

A model stays in memory as long as it is held: hold it between `acquire` and `release`. A member
that only drafts (`source: ngram`, `suffix` or `drafter:`) has a name and no model: it is always
there, takes no place or memory, counts for no limit, and cannot be acquired.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from modelpool.checkpoint.tokenizers import UNUSED_IDS
from modelpool.config import ModelConfig, PoolConfig, validate_config
from modelpool.device_manager import DeviceInfo, Placement, read_devices
from modelpool.errors import ConfigError, UnsupportedModelError
from modelpool.fast.tuning import Tuning
from modelpool.kv_memory import KVMemory
from modelpool.loaded_models import LoadedModels
from modelpool.member import (
    Member,
    check_tokenizers,
    files_of,
    open_member,
    tokenizer_of,
    weakest_first,
)
from modelpool.placed_members import MemberPlan, PlacedMembers
from modelpool.progress import LoadProgress, counted_loops
from modelpool.twin import share_weights

if TYPE_CHECKING:
    from modelpool.packed_model import PackedModel

logger = logging.getLogger(__name__)

_MIB = 2**20
_UNLIMITED = 2**31  # tokens


# Tokens of KV that each loaded model takes, given the most tokens of a sequence.
KVTokens = Callable[[int], int]
Loader = Callable[[ModelConfig, Path, Placement, int, str, Tuning], "PackedModel"]


def _no_kv(longest: int) -> int:
    return 0


class ModelPool:
    """Pool of models; see the module. Thread-safe."""

    # One model at a time in a process: while transformers loads one, it changes the state of torch
    # for all threads.
    _loading = threading.Lock()

    def __init__(
        self,
        config: PoolConfig,
        *,
        kv_tokens: KVTokens | KVMemory = _no_kv,
        row_states: int = 0,
        devices: Sequence[DeviceInfo] | None = None,
        loader: Loader | None = None,
        headers_only: bool = False,
        progress: LoadProgress | None = None,
    ) -> None:
        """Open, compare and place the members.

        Args:
            config: declaration of the pool.
            kv_tokens: tokens of KV for which each model's place must have room, a function of
                `longest_sequence`; or the memory of all models' KV together, for as many as fit.
            row_states: rows for whose states a place must have room if a model's layers are
                recurrent.
            devices: devices to place on; by default this machine's devices.
            loader: `modelpool.loader.load_model`, or a stand-in for it.
            headers_only: weights are not downloaded, except to be inflated, and nothing can be
                loaded.
            progress: records the steps that take time.

        Attributes:
            left_out: why a drafter that cannot be served is no member, by name.
            models: members that have a model, weakest first, the target last.
            draft_only: the others. `names`: these and the models.
        """
        self.config = config
        self.target = config.target
        self.progress = progress or LoadProgress()
        modelless = [model for model in config.models if not model.has_model]
        only = sorted(modelless, key=lambda model: not model.reads_texts)  # text drafters first
        self.draft_only = tuple(model.name for model in only)
        members, self.left_out = self._open_all(headers_only)
        self._members = {name: replace(one, states=row_states) for name, one in members.items()}
        self.models = tuple(weakest_first(self._members, config.target))
        self.names = (*self.draft_only, *self.models)
        target = self._members[config.target]
        self.tokenizer: PreTrainedTokenizerBase = tokenizer_of(target)
        self.vocab_size = check_tokenizers(self._members, config.target, self.tokenizer)
        # Ids below `vocab_size` that are never chosen. Unused ids after all used ones are cut off.
        self.unused_ids: tuple[int, ...] = tuple(self.tokenizer.init_kwargs.get(UNUSED_IDS, ()))
        kv = kv_tokens if isinstance(kv_tokens, KVMemory) else kv_tokens(self.longest_sequence)
        self._placed = PlacedMembers(config, self._members, devices or read_devices(), kv)
        self._loaded = LoadedModels(config, self._placed)
        self._loader = loader

    @classmethod
    def from_config(
        cls,
        config: PoolConfig | Mapping[str, Any],
        *,
        kv_tokens: KVTokens | KVMemory = _no_kv,
        row_states: int = 0,
        progress: LoadProgress | None = None,
    ) -> "ModelPool":
        """Return a pool from the `pool:` section of a configuration; may raise `ConfigError`."""
        checked = validate_config(PoolConfig, config, "pool")
        return cls(checked, kv_tokens=kv_tokens, row_states=row_states, progress=progress)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a text of the target, as in `generate`."""
        ends = self._members[self.target].facts.eos_token_ids
        found = frozenset(end for end in ends if end < self.vocab_size)
        if found or self.tokenizer.eos_token_id is None:
            return found
        return frozenset([int(self.tokenizer.eos_token_id)])

    def path(self, name: str) -> Path:
        """Return the directory of a model's checkpoint, for `transformers`."""
        return self._member(name).path

    @property
    def quoters(self) -> frozenset[str]:
        """The members that are text drafters."""
        return frozenset(one.name for one in self.config.models if one.reads_texts)

    def opened(self, name: str) -> ModelConfig:
        """Return the configuration of a model, with the settings that its file decided."""
        return self._placed[name].config

    def files(self, name: str) -> tuple[Path, ...]:
        """Return the files that determine a model's text: weights, configuration and tokenizer.

        Raises `ValueError` if a GGUF file has changed since it was read.
        """
        return files_of(self.path(name))

    def parameter_count(self, name: str) -> int:
        """Return the number of parameters, 0 for a member without a model."""
        return 0 if name in self.draft_only else self._member(name).facts.parameter_count

    def max_positions(self, name: str) -> int:
        """Return the longest sequence at which a model can be used, in tokens."""
        return _UNLIMITED if name in self.draft_only else self._member(name).facts.max_positions

    @property
    def kv_tokens(self) -> int:
        """Number of tokens for which each loaded model's KV store has memory."""
        return self._placed.kv_tokens

    @property
    def bits_depend_on(self) -> str | None:
        """Cause of changes in the target's last bits besides its text, or None if none is known.

        It is found when the target is loaded (`bit_trial`): texts may then differ between batches.
        """
        model = self._loaded.touch(self.target, hold=False)
        return None if model is None else model.bits_depend_on

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a sequence at which every model can be used."""
        return min(member.facts.max_positions for member in self._members.values())

    def placement(self, name: str) -> Placement:
        """Return where a model is, or will be loaded."""
        return self._placed.placement(self._member(name).config.name)

    def plan(self, name: str) -> MemberPlan:
        """Return what a model takes, and how it will run, once it is loaded at its place."""
        return self._placed.plan(self._member(name).config.name)

    def is_loaded(self, name: str) -> bool:
        """Return whether it can be used without loading anything."""
        return name in self.draft_only or name in self._loaded

    def weight_bytes(self) -> dict[str, int]:
        """Return the bytes of the weights of loaded models; 0 for members without weights."""
        loaded = [name for name in self.names if self.is_loaded(name)]
        return {
            name: 0 if name in self.draft_only else self.plan(name).footprint.weight_bytes
            for name in loaded
        }

    def has_room(self, name: str) -> bool:
        """Return whether it is loaded, or could be without evicting another model."""
        return name in self.draft_only or self._loaded.has_room(name)

    def fit_together(self, names: Iterable[str]) -> bool:
        """Return whether they fit in memory at once, beside the target and the pinned models."""
        asked = {name for name in names if name not in self.draft_only} - {self.target}
        if not asked:  # the target may always be loaded
            return True
        kept = {name for name, member in self._members.items() if member.config.pinned}
        return self._loaded.fit(asked | kept | {self.target})

    def get(self, name: str) -> "PackedModel":
        """Return a model, and load it first if it is not loaded.

        Raises `KeyError` for a name that is not in the pool, `ValueError` for a draft-only member,
        `UnsupportedModelError` for an architecture that the plug-in refuses, `ConfigError` for
        weights that cannot be read or a target for which its device has no memory, and
        `PoolFullError` if the pool's limits leave no room.
        """
        return self._get(name, hold=False)

    def acquire(self, name: str) -> "PackedModel":
        """Return a model, like `get`, and keep it until it is released as often as acquired."""
        return self._get(name, hold=True)

    def release(self, name: str) -> None:
        """End one `acquire`."""
        self._loaded.release(name)

    def evict(self, name: str) -> bool:
        """Drop an idle model's weights; return False if it is not loaded, in use, or kept."""
        return self._loaded.evict(name)

    def make_room(self, name: str) -> None:
        """Evict models, least recently used first, until `name` fits, or raise `PoolFullError`.

        For callers that hold memory of evicted models, and release it before `name` is loaded.
        """
        self._loaded.make_room(self._member(name).config.name)

    def _open_all(self, headers_only: bool) -> tuple[dict[str, Member], dict[str, str]]:
        """Open the members that have a model; return them, and why other drafters are left out.

        Raises `UnsupportedModelError` for the target, and if no other drafter remains.
        """
        members, refused = dict[str, Member](), dict[str, UnsupportedModelError]()
        for index, model in enumerate(self.config.models):
            if not model.has_model:
                continue
            try:
                members[model.name] = self._open(model, f"pool.models[{index}]", headers_only)
            except UnsupportedModelError as error:
                if model.name == self.config.target:
                    raise
                refused[model.name] = error
        if refused and len(members) + len(self.draft_only) == 1:
            raise next(iter(refused.values()))
        left_out = {name: str(refusal) for name, refusal in refused.items()}
        for name, reason in left_out.items():
            logger.warning("%r is left out: %s", name, reason)
        return members, left_out

    def _open(self, model: ModelConfig, field: str, headers_only: bool) -> Member:
        model = self.config.described(model)
        is_remote = model.source.startswith("hub:")
        inflates = model.inflate_to is not None
        self.progress.begin(
            "inflating" if inflates else "downloading" if is_remote else "reading", model.name
        )
        return open_member(model, field, headers_only, self.progress)

    def _member(self, name: str) -> Member:
        if name in self.draft_only:
            raise ValueError(f"{name!r} has no model: it drafts by itself")
        return self._members[name]

    def _get(self, name: str, hold: bool) -> "PackedModel":
        self._member(name)
        model = self._loaded.touch(name, hold)
        if model is not None:
            return model
        with self._loading:
            model = self._loaded.touch(name, hold)  # another thread may have loaded it meanwhile
            if model is None:
                self.make_room(name)
                model = self._load(name)
                self._loaded.add(name, model, hold)
            return model

    def _load(self, name: str) -> "PackedModel":
        placed = self._placed
        try:
            return self._load_placed(name)
        except torch.OutOfMemoryError as error:
            if name == self.target:
                reason = f"no memory for the target {name!r} on {placed.where(name)}: {error}"
                raise ConfigError(f"{placed[name].field}.device", reason) from error
            logger.warning("no memory for %s on %s: it goes to the CPU", name, placed.where(name))
        torch.cuda.empty_cache()
        placed.move_to_cpu(name)
        return self._load_placed(name)

    def _load_placed(self, name: str) -> "PackedModel":
        self.progress.begin("loading", name)
        member, placement = self._placed[name], self._placed.placement(name)
        loader, tuning = self._loader or _default_loader(), self._placed.tuning(name)
        weight_bytes = member.footprint.weight_bytes
        with counted_loops(self.progress, name, weight_bytes, is_mapped=placement.is_on_cpu):
            model = loader(
                member.config, member.path, placement, self.vocab_size, member.field, tuning
            )
        target = self._loaded.touch(self.target, hold=False) if name == self.config.twin else None
        if target is not None:
            spared = share_weights(model.model, target.model)
            logger.info("%s shares %.1f MiB with %s", name, spared / _MIB, self.target)
        return model


def _default_loader() -> Loader:
    # Imported here, because it imports transformers' modelling code: seconds that an error of
    # the configuration should not wait for.
    from modelpool.loader import load_model

    return load_model
