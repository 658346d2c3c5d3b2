"""Models on this machine that may draft for a target, each with the reason for or against it.

Contract: no drafter is downloaded and no weights are read: the checks that a pool makes of its
members need only configurations, tokenizers and headers of files. `picked` is the choice of
`--draft auto`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import constants
from transformers import PreTrainedTokenizerBase

from modelpool.checkpoint.bundled import bundled_root
from modelpool.checkpoint.cache_dir import cached_name, expanded
from modelpool.checkpoint.headers import has_weights
from modelpool.checkpoint.source import resolve_description
from modelpool.config import ModelConfig
from modelpool.errors import ConfigError
from modelpool.families import family_of
from modelpool.gguf.header import ENDING
from modelpool.gguf.hub import find_gguf, tag_of, whole_models
from modelpool.member import Member, check_tokenizers, files_of, open_member, tokenizer_of
from modelpool.progress import LoadProgress

LARGEST_SHARE = 0.5  # of the target's bytes read for a token; above it nothing is gained
_FIELD = "drafter"
_UNFINISHED = "its download is not finished"


@dataclass(frozen=True)
class FoundDrafter:
    """A model's folder, or its GGUF file.

    `name`: its name on the hub, or the path as `--draft` takes it.
    """

    name: str
    path: Path
    is_whole: bool = True


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model that may draft for the target, with the reason if it cannot.

    Attributes:
        parameters, read_bytes: None if it cannot be read; the latter are of weights, for a token.
        share: `read_bytes` over those of the target.
        refusal: the reason why it cannot draft; None: it fits.
        is_sibling: it is in a family of `FAMILIES` with the target.
    """

    name: str
    path: Path
    parameters: int | None = None
    read_bytes: int | None = None
    share: float | None = None
    refusal: str | None = None
    is_sibling: bool = False

    @property
    def source(self) -> str:
        return _source(self.path)


def find_target(source: str, field: str, fetching: LoadProgress | None = None) -> Member:
    """Return a pool's `source` as a member; a hub model is taken from the local cache.

    `fetching` records the progress of downloads: the hub describes a model that is not in the
    cache, or a GGUF file is downloaded. Without it, such a model is an error. Raises `ConfigError`.
    """
    scheme, _, rest = source.partition(":")
    name = rest or source
    try:
        if scheme == "hub":
            source = _of_hub(rest, field, fetching)
        elif scheme == "path":
            name = cached_name(expanded(rest).resolve()) or rest
        return _open(name, source)
    except ConfigError as error:
        raise type(error)(field, error.reason) from error


def _of_hub(name: str, field: str, fetching: LoadProgress | None) -> str:
    """Return the source of a repository's cached model, else the hub's; may raise `ConfigError`."""
    source = f"hub:{name}"
    cached = {one.name: one.path for one in _cached() if one.is_whole}
    if name in cached:
        return _source(cached[name])
    in_gguf = ":" in name or any(one.startswith(f"{name}:") for one in cached)
    if in_gguf or (fetching and resolve_description(source, field=field) is None):
        found = find_gguf(source, field=field, asks_hub=fetching is not None)
        if fetching and found.missing:
            fetching.begin("downloading", name)
            found.download(fetching)
        return _source(found.file)
    if fetching is None:
        raise ConfigError(field, f"{name!r} is not in the local cache: hf download {name}")
    return source


def candidates(target: Member, folders: Iterable[Path] = ()) -> list[Candidate]:
    """Return models of the local cache, of the folders, and beside the target.

    Those that fit come first, by the bytes that they read, then the others by name. Raises
    `ConfigError` for a folder that does not exist.
    """
    found = {one.path.resolve(): one for one in _all_found(target, folders)}
    tokenizer, own = tokenizer_of(target), _place(target).resolve()
    judged = [
        Candidate(name=one.name, path=one.path, refusal="it is the target itself")
        if path == own
        else _judged(one, target, tokenizer)
        for path, one in found.items()
    ]
    fitting = sorted((one for one in judged if one.refusal is None), key=_reads)
    return fitting + sorted((one for one in judged if one.refusal), key=lambda one: one.name)


def picked(found: Iterable[Candidate]) -> Candidate | None:
    """Return the fitting sibling that reads least, else the fitting model that does, or None."""
    fitting = [one for one in found if one.refusal is None]
    return min(fitting, key=lambda one: (not one.is_sibling, _reads(one)), default=None)


def read_bytes(member: Member) -> int:
    """Return the bytes of weights read for a token; all of them if that depends on the token."""
    facts = member.facts
    return facts.weight_bytes if facts.read_bytes is None else facts.read_bytes


def _reads(one: Candidate) -> tuple[int, str]:
    return one.read_bytes or 0, one.name


def _all_found(target: Member, folders: Iterable[Path]) -> Iterator[FoundDrafter]:
    yield from _cached()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError("--folder", f"no directory {str(folder)!r}")
        yield from _inside(folder)
    root, place = bundled_root(), _place(target)
    if place.parent == root:
        yield from (FoundDrafter(one.name, one) for one in _folders(root))
    elif cached_name(place) is None and cached_name(place.parent) is None:
        yield from _inside(place.parent)


def _cached() -> Iterator[FoundDrafter]:
    """Yield models of the hub's local cache, at the revision of `main`, or at the only one."""
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        snapshots = {one.name: one for one in folder.glob("snapshots/*")}
        main = folder / "refs" / "main"
        named = main.read_text(errors="replace").strip() if main.is_file() else None
        revision = next(iter(snapshots), "") if named is None else named
        path = snapshots.get(revision, folder)
        is_left = any(folder.glob("blobs/*.incomplete"))  # maybe by an earlier attempt
        is_whole = path is not folder and (not is_left or _has_weights(path))
        name = cached_name(folder / "snapshots" / "any") or folder.name
        ggufs = _gguf_files(path, path.rglob(f"*{ENDING}"))
        yield from (FoundDrafter(f"{name}:{tag_of(stem)}", file) for stem, file in ggufs.items())
        if not ggufs or any(path.glob("*.safetensors")):
            yield FoundDrafter(name, path, is_whole)


def _has_weights(folder: Path) -> bool:
    """Return whether the weights are there; True for a bad index, which fails when opened."""
    try:
        return has_weights(folder)
    except (ValueError, LookupError, TypeError):
        return True


def _inside(folder: Path) -> Iterator[FoundDrafter]:
    """Yield the folder itself, or those in it, and GGUF files in either."""
    checkpoints = [folder] if (folder / "config.json").is_file() else _folders(folder)
    files = [*folder.glob(f"*{ENDING}"), *folder.glob(f"*/*{ENDING}")]
    found = [*checkpoints, *_gguf_files(folder, files).values()]
    yield from (FoundDrafter(str(one), one) for one in found)


def _gguf_files(folder: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Return the first file of each complete model, by the model's name in the folder."""
    models = whole_models(str(one.relative_to(folder)) for one in files if one.is_file())
    return {stem: folder / parts[0] for stem, parts in models.items()}


def _folders(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob("*/config.json"))


def _source(path: Path) -> str:
    return f"gguf:{path}" if path.suffix == ENDING else f"path:{path}"


def _place(member: Member) -> Path:
    """Return the folder of a member, or its GGUF file."""
    first = files_of(member.path)[0]
    return first if first.suffix == ENDING else member.path


def _open(name: str, source: str) -> Member:
    """Open a source by its headers only; may raise `ConfigError`."""
    named = ModelConfig(name=re.sub(r"[\s>,]+", "-", name), source=source)
    return open_member(named, _FIELD, headers_only=True)


def _judged(found: FoundDrafter, target: Member, tokenizer: PreTrainedTokenizerBase) -> Candidate:
    """Return a model with the result of its checks; any error of reading it becomes its refusal."""
    family = family_of(target.config.name)
    is_sibling = family is not None and found.name in family.hub_ids
    one = Candidate(name=found.name, path=found.path, is_sibling=is_sibling)
    try:
        return _compared(one, found, target, tokenizer)
    except ConfigError as error:
        return replace(one, refusal=error.reason)
    except Exception as error:
        reason = " ".join(str(error).split())
        return replace(one, refusal=f"cannot be read: {type(error).__name__}: {reason}")


def _compared(
    one: Candidate, found: FoundDrafter, target: Member, tokenizer: PreTrainedTokenizerBase
) -> Candidate:
    """Return `one` with its facts and its refusal; raise any error of reading it."""
    has_index = (found.path / "model.safetensors.index.json").is_file()
    if not found.is_whole or (has_index and not _has_weights(found.path)):
        return replace(one, refusal=_UNFINISHED)
    member = _open(found.name, _source(found.path))
    read = read_bytes(member)
    share = read / max(read_bytes(target), 1)
    return replace(
        one,
        parameters=member.facts.parameter_count,
        read_bytes=read,
        share=share,
        refusal=_misfit(member, target, tokenizer, share),
    )


def _misfit(
    member: Member, target: Member, tokenizer: PreTrainedTokenizerBase, share: float
) -> str | None:
    """Return the reason why a model that can be served does not draft for this target, or None."""
    if member.facts.is_quantized:
        return "its weights are quantised by a method that is only known to run once it is loaded"
    if share > LARGEST_SHARE:
        return f"it reads {share:.0%} of what the target reads for a token: nothing to gain"
    own, name = target.config.name, member.config.name
    try:
        check_tokenizers({name: member, own: target}, own, tokenizer)
    except ConfigError as error:
        return error.reason
    return None
