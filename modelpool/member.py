"""Member: a model of the pool as its configuration and checkpoint describe it, without weights.

Contract: faults of a source, and misfits with the other members, raise `ConfigError` with the
field's name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from modelpool.checkpoint.footprint import (
    CheckpointFacts,
    Kept,
    ModelFootprint,
    check_served,
    read_checkpoint,
)
from modelpool.checkpoint.headers import Header
from modelpool.checkpoint.released import SCHEME, download, find_released, released_path
from modelpool.checkpoint.source import resolve_description, resolve_headers, resolve_source
from modelpool.checkpoint.tokenizers import (
    files_fingerprint,
    id_counts,
    load_tokenizer,
    tokenizer_difference,
)
from modelpool.config import ModelConfig, Weights
from modelpool.errors import ConfigError
from modelpool.fast.linear import gains_on_cpu
from modelpool.fast.panels import exact_kernels, quantised_refusal
from modelpool.gguf.description import NAME as GGUF
from modelpool.gguf.description import describe, described_in, tokenizer_in
from modelpool.gguf.header import is_gguf
from modelpool.gguf.hub import find_gguf, tag_in
from modelpool.inflate.inflated import inflated_source
from modelpool.progress import LoadProgress

_FILES = frozenset({".safetensors", ".json", ".model", ".txt", ".jinja", ".py"})


@dataclass(frozen=True, kw_only=True)
class Member:
    config: ModelConfig
    field: str  # its place in the configuration, such as pool.models[1]
    path: Path
    facts: CheckpointFacts
    headers: Sequence[Header] | None = None  # of weights that are not in `path`
    states: int = 0  # rows for whose states its place must have room if layers are recurrent
    packs: bool = False  # a tied head is copied beside its embedding

    @property
    def footprint(self) -> ModelFootprint:
        facts, config = self.facts, self.config
        copies_head = self.packs and gains_on_cpu(facts.tied_elements, getattr(torch, facts.dtype))
        return facts.footprint(config.name, self.field, config.device, self.states, copies_head)

    def packed(self) -> "Member":
        """Return it on the CPU with a packed head; if the head is a copy, it asks for the CPU."""
        packed = replace(self, packs=True)
        if packed.footprint == self.footprint:
            return packed
        return replace(packed, config=self.config.model_copy(update={"device": "cpu"}))

    def on_cpu(self, dtype: str) -> "Member":
        """Return it with a request for the CPU and a dtype."""
        config = self.config.model_copy(update={"dtype": dtype, "device": "cpu"})
        facts = _read_facts(config, self.path, self.field, self.headers)
        return replace(self, config=config, facts=facts)


def open_member(
    config: ModelConfig, field: str, headers_only: bool, progress: LoadProgress | None = None
) -> Member:
    """Open a member; may raise `ConfigError`.

    `headers_only`: weights are not downloaded, except to be inflated. `progress`: see `ModelPool`.
    """
    if is_gguf(config.source):
        return _open_gguf(config, field, config.source)
    if config.source.startswith(SCHEME):
        return _open_gguf(config, field, str(_released(config, field, headers_only, progress)))
    headers: Sequence[Header] | None = None
    source, remote_code = config.source, config.trust_remote_code
    resolve: dict[str, Any] = {
        "field": field,
        "revision": config.revision,
        "remote_code": remote_code,
    }
    if source.startswith("hub:"):  # models that cannot be served are not downloaded
        described = None if tag_in(source) else resolve_description(source, **resolve)
        if described is None:
            found = find_gguf(source, field=field, revision=config.revision)
            if found.missing and headers_only:
                reason = (
                    f"{found.asked!r} is not in the local cache, where its header would be read"
                )
                raise ConfigError(f"{field}.source", f"{reason}: `specrouter serve` downloads it")
            found.download(progress)
            if progress is not None:
                progress.begin("reading", config.name)
            return _open_gguf(config, field, str(found.file))
        check_served(described, field, remote_code)
    if headers_only and config.inflate_to is None:
        path, headers = resolve_headers(source, **resolve)
    else:
        path = resolve_source(source, **resolve)
    if config.inflate_to is not None:
        path = inflated_source(path, config.inflate_to, dtype=config.dtype, field=field)
    facts = _read_facts(config, path, field, headers)
    return Member(config=config, field=field, path=path, facts=facts, headers=headers)


def _released(
    config: ModelConfig, field: str, headers_only: bool, progress: LoadProgress | None
) -> Path:
    """Return the file of a released model, after a download if needed, or raise `ConfigError`."""
    wanted = find_released(config.source, field)
    path = released_path(wanted)
    if path.is_file():
        return path
    if headers_only:
        reason = (
            "is not in the cache, where its header would be read: `specrouter serve` downloads it"
        )
        raise ConfigError(f"{field}.source", f"{config.source!r} {reason}")
    if progress is not None:
        progress.begin("downloading", config.name)
    try:
        download(wanted)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}.source", f"{config.source!r} cannot be had: {error}") from error
    if progress is not None:
        progress.begin("reading", config.name)
    return path


def _open_gguf(config: ModelConfig, field: str, source: str) -> Member:
    """Open a GGUF file.

    On the CPU linear layers keep as few bits as the file has, unless a dtype is asked for.
    """
    if config.inflate_to is not None:
        raise ConfigError(f"{field}.inflate_to", "a GGUF file cannot be inflated")
    found = describe(source, field)
    on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    if (config.weights, config.dtype) == ("auto", "auto") and on_cpu:
        # Norms and biases are small, and in float32 they are the same on every CPU.
        dtype = "float32" if found.weights == "exact" else "auto"
        config = config.model_copy(update={"weights": found.weights, "dtype": dtype})
    facts = _read_facts(config, found.folder, field, found.headers)
    return Member(config=config, field=field, path=found.folder, facts=facts, headers=found.headers)


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a model; `path` is its checkpoint, or describes a GGUF file."""
    if not (path / GGUF).is_file():
        return tuple(sorted(one for one in path.iterdir() if one.suffix in _FILES))
    found = described_in(path)
    return tuple(sorted({found.file, *(one.file for one in found.tensors.values())}))


def _read_facts(
    config: ModelConfig, path: Path, field: str, headers: Sequence[Header] | None
) -> CheckpointFacts:
    found = read_checkpoint(
        path,
        field=field,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        kept=_kept(config.weights),
        trust_remote_code=config.trust_remote_code,
        headers=headers,
    )
    if config.weights == "exact" and not found.has_blocks:
        reason = "exact keeps blocks, and the checkpoint has none: set int8, int4 or auto"
        raise ConfigError(f"{field}.weights", reason)
    return found


def _kept(weights: Weights) -> Kept:
    """Return what the CPU can keep; only a request for quantised weights loads the library."""
    has_kernels = weights != "auto" and exact_kernels() is not None
    return Kept(weights, has_int8=quantised_refusal() is None, has_kernels=has_kernels)


def weakest_first(members: Mapping[str, Member], target: str) -> tuple[str, ...]:
    """Return names by number of parameters, the target last; equal ones in configured order."""
    return tuple(
        sorted(members, key=lambda name: (name == target, members[name].facts.parameter_count))
    )


def tokenizer_of(member: Member) -> PreTrainedTokenizerBase:
    if (member.path / GGUF).is_file():
        return tokenizer_in(member.path, member.field)
    return load_tokenizer(
        member.path, field=member.field, trust_remote_code=member.config.trust_remote_code
    )


def check_tokenizers(
    members: Mapping[str, Member], target: str, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Check that all members have the target's tokenizer, and embed each id that it uses.

    Return the number of ids that the target embeds and its tokenizer has.
    """
    ids, least = id_counts(tokenizer)
    vocab_size = min(ids, members[target].facts.vocab_rows)
    needed = max(vocab_size, least)
    equal = {files_fingerprint(members[target].path)}
    for name, member in members.items():
        fingerprint = files_fingerprint(member.path)
        if fingerprint not in equal:
            difference = tokenizer_difference(tokenizer, tokenizer_of(member))
            if difference is not None:
                raise ConfigError(
                    f"{member.field}.source",
                    f"the tokenizer of {name!r} is not that of the target {target!r}: "
                    f"{difference}; a pool shares one tokenizer",
                )
            equal.add(fingerprint)
        if member.facts.vocab_rows < needed:
            raise ConfigError(
                f"{member.field}.source",
                f"{name!r} embeds {member.facts.vocab_rows} ids, and the tokenizer of "
                f"{target!r} has {needed}",
            )
    return vocab_size
