"""GGUF files of the Hugging Face hub: `hub:ORG/REPO:QUANT` becomes a file in the hub's cache.

Contract: the hub's library lists, transfers and keeps files. Files in its cache are found offline,
and when the hub cannot be reached. An interrupted download continues at the next try. A file enters
the cache only with the size and the SHA-256 that the hub lists; if the hub lists no SHA-256, the
log says so.
"""

import errno
import hashlib
import logging
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub.errors import LocalEntryNotFoundError, RevisionResolutionError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    WeakFileLock,
    build_hf_headers,
    tqdm,
)

from modelpool.checkpoint.source import NO_ROOM, hub_faults
from modelpool.errors import ConfigError
from modelpool.progress import LoadProgress

logger = logging.getLogger(__name__)

_PART = re.compile(r"-\d{5}-of-(\d{5})$")
_TAG = re.compile(r"(?:^|[-._/])((?:UD-)?(?:[IT]?Q\d\w*|BF16|FP?16|FP?32|MXFP4\w*))$", re.I)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.I)
_DEFAULT, _NEXT = "q4_k_m", "q4"  # if no tag is given: this one, else one that contains the second


@dataclass(frozen=True)
class _Listed:
    """A file as the hub lists it; `sha256` is None if the hub does not list it."""

    name: str
    size: int
    sha256: str | None


def tag_in(source: str) -> str | None:
    """Return the QUANT of `hub:ORG/REPO:QUANT`."""
    return source.removeprefix("hub:").partition(":")[2] or None


@dataclass(frozen=True, kw_only=True)
class HubGguf:
    """A model of a repository, in one file or in parts that lie beside each other.

    Attributes:
        asked: `ORG/REPO:QUANT`, or `ORG/REPO`.
        folder: folder in the hub's cache.
        parts: names of its files in the folder.
        missing: those of them that have to be downloaded.
        total_bytes: size of all parts, if some are missing.
    """

    asked: str
    field: str
    revision: str | None
    commit: str
    folder: Path
    parts: Sequence[str]
    missing: Sequence[_Listed]
    total_bytes: int

    @property
    def file(self) -> Path:
        """Path of the first part."""
        return self.folder / self.parts[0]

    def download(self, progress: LoadProgress | None = None) -> None:
        """Download the missing files; may raise `ConfigError`."""
        repository = self.asked.partition(":")[0]
        done = self.total_bytes - sum(one.size for one in self.missing)
        bar = _bar(progress or LoadProgress(), done, self.total_bytes)
        with hub_faults(self.asked, self.revision, self.field):
            for file in self.missing:
                _download(repository, self.commit, file, bar)


def find_gguf(
    source: str, *, field: str, revision: str | None = None, asks_hub: bool = True
) -> HubGguf:
    """Return the model of `hub:ORG/REPO:QUANT`, or of `hub:ORG/REPO`.

    `asks_hub`: if False, only the cache is searched. Raises `ConfigError` for `{field}.source`.
    """
    asked = source.removeprefix("hub:")
    repository = asked.partition(":")[0]
    with hub_faults(asked, revision, field):
        try:
            resolved = HfApi().resolve_revision(
                repository, revision=revision, local_files_only=not asks_hub
            )
            folder = _storage(repository) / "snapshots" / resolved.resolved
            here = {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}
            listed, unreachable = _listed(repository, resolved.resolved) if asks_hub else ({}, None)
            parts = _parts(listed or here, asked)
        except (RevisionResolutionError, LookupError) as error:
            if not asks_hub:
                reason = f"{asked!r} is not in the local cache: `specrouter serve` downloads it"
                raise ConfigError(f"{field}.source", reason) from error
            if isinstance(error, RevisionResolutionError):
                raise
            if unreachable is not None:
                raise LocalEntryNotFoundError(asked) from unreachable
            raise ConfigError(f"{field}.source", str(error)) from error
    missing = [listed[name] for name in parts if name not in here]
    return HubGguf(
        asked=asked,
        field=field,
        revision=revision,
        commit=resolved.resolved,
        folder=folder,
        parts=parts,
        missing=missing,
        total_bytes=sum(listed[name].size for name in parts) if missing else 0,
    )


def whole_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each complete model, by its name without part and ending."""
    found = dict[str, list[str]]()
    for name in sorted(names):
        stem = name.removesuffix(".gguf")
        if stem != name and not _NO_MODEL.search(name.rpartition("/")[2]):
            found.setdefault(_PART.sub("", stem), []).append(name)
    return {stem: files for stem, files in found.items() if len(files) == _count_of(files[0])}


def tag_of(stem: str) -> str:
    """Return the quantisation at the end of a name, such as `Q4_K_M`, else the name."""
    match = _TAG.search(stem)
    return match[1] if match else stem.rpartition("/")[2]


def _count_of(file: str) -> int:
    match = _PART.search(file.removesuffix(".gguf"))
    return int(match[1]) if match else 1


def _parts(names: Iterable[str], asked: str) -> list[str]:
    """Return the files of the requested model; raise `LookupError` if there is none."""
    names = list(names)
    models = whole_models(names)
    repository, _, tag = asked.partition(":")
    if not models:
        has_others = any(name.endswith(".safetensors") for name in names)
        hint = f": leave out {f':{tag}'!r}" if tag and has_others else ""
        raise LookupError(f"{repository!r} has no GGUF files{hint}")
    tags = {stem: tag_of(stem) for stem in models}
    wanted = tag.casefold().removesuffix(".gguf")
    if not wanted:
        fit = {stem: one.casefold() for stem, one in tags.items()}
        return models[min(fit, key=lambda stem: (fit[stem] != _DEFAULT, _NEXT not in fit[stem]))]
    ending = re.compile(rf"(^|[-._/]){re.escape(wanted)}$")
    fitting = [stem for stem, one in tags.items() if one.casefold() == wanted]
    fitting += [stem for stem in tags if ending.search(stem.casefold())]
    if not fitting:
        known = ", ".join(dict.fromkeys(tags.values()))
        raise LookupError(f"{repository!r} has no {tag!r} among its GGUF files; it has {known}")
    return models[fitting[0]]


def _listed(repository: str, commit: str) -> tuple[Mapping[str, _Listed], Exception | None]:
    """Return files by their names, and the error if the hub does not list them."""
    try:
        known = HfApi().model_info(repository, revision=commit, files_metadata=True)
        found = dict[str, _Listed]()
        for one in known.siblings or ():
            sha256 = None if one.lfs is None else one.lfs.sha256
            found[one.rfilename] = _Listed(one.rfilename, one.size or 0, sha256)
        return found, None
    except Exception as error:  # classes of many libraries; used if the cache has no such model
        return {}, error


def _download(repository: str, commit: str, file: _Listed, bar: type[tqdm]) -> None:
    url = hf_hub_url(repository, file.name, revision=commit)
    etag = get_hf_file_metadata(url).etag
    if etag is None:
        raise ValueError(f"the hub names no ETag of {file.name}")
    storage = _storage(repository)
    blob = storage / "blobs" / etag
    lock = storage.parent / ".locks" / storage.name / f"{etag}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.exists():
            part = blob.with_name(f"{etag}.incomplete")
            _transfer(repository, url, file, part, bar)
            part.replace(blob)
    hf_hub_download(repository, file.name, revision=commit)  # finds the blob, and makes its link


def _transfer(repository: str, url: str, file: _Listed, part: Path, bar: type[tqdm]) -> None:
    """Complete `part`, which may hold the beginning of the file.

    The library alone would download it from the beginning each time.
    """
    if part.exists() and part.stat().st_size > file.size:
        part.unlink()
    if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:  # `http_get` refuses it
        most_gb = constants.MAX_HTTP_DOWNLOAD_SIZE // 10**9
        raise ValueError(
            f"{file.name} has {file.size / 1e9:.0f} GB, and over {most_gb} GB are not downloaded "
            f"here: `hf download {repository} {file.name}`, then it is found"
        )
    try:
        with part.open("ab") as stream:
            _check_room(part.parent, file.size - stream.tell())
            http_get(
                url,
                stream,
                resume_size=stream.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=file.name,
                tqdm_class=bar,
            )
    except Exception as error:
        done = part.stat().st_size
        if getattr(error, "errno", None) in NO_ROOM:
            raise
        if done <= file.size:
            sizes = f"{done / 1e9:.2f} of {file.size / 1e9:.2f} GB"
            reason = f"{file.name} broke off at {sizes} ({error}): the next try goes on from there"
            raise ConnectionError(reason) from error
    fault = _fault(part, file)
    if fault is not None:
        part.unlink()
        raise ValueError(f"{file.name} {fault}: what was downloaded is removed; try again")


def _fault(part: Path, file: _Listed) -> str | None:
    size = part.stat().st_size
    if size != file.size:
        return f"has {size} bytes, and the hub lists {file.size}"
    if file.sha256 is None:
        logger.info("downloaded %s: the hub lists no SHA-256, its size is right", file.name)
        return None
    with part.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != file.sha256:
        return f"has the SHA-256 {found[:12]}..., and the hub lists {file.sha256[:12]}..."
    logger.info("downloaded %s: its SHA-256 is the one that the hub lists", file.name)
    return None


def _bar(progress: LoadProgress, done: int, total: int) -> type[tqdm]:
    """Return a class of progress bars that are shown only by `progress`."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]
            self._count(options.get("initial", 0))

        def update(self, n: float | None = 1) -> bool | None:
            self._count(int(n or 0))
            return super().update(n)

        def _count(self, more: int) -> None:
            nonlocal done
            done += more
            progress.count(done, total)

    return Bar


def _check_room(folder: Path, size: int) -> None:
    """Raise `OSError` if the disk lacks room."""
    free = shutil.disk_usage(folder).free
    if free < size:
        reason = f"{size / 1e9:.2f} GB are to come, and {free / 1e9:.2f} GB are free"
        raise OSError(errno.ENOSPC, reason)


def _storage(repository: str) -> Path:
    name = repo_folder_name(repo_id=repository, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / name
