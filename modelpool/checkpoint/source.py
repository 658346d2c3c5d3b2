"""Files of a member: a source string becomes a local directory.

    bundled:NAME        weights that are part of this package
    path:DIR, /DIR, ./DIR, ~/DIR    a checkpoint as `save_pretrained` writes it; a relative path
        starts at the working directory
    hub:ORG/NAME        a repository of the Hugging Face hub, at `revision`

The sources `ngram` and `quantised:TARGET` have no files, and a GGUF file, also one of the hub, has
a reader of its own (`modelpool.gguf`): this module resolves none of them.

A hub repository is downloaded here, at construction, so that a missing model is an error of the
configuration and not of a request. Only safetensors, JSON, tokenizer and template files are
fetched. With HF_HUB_OFFLINE set, only the local cache is read.

Importing this module does not import PyTorch: a wrong source is reported at once.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import (
    constants,
    get_cached_repo_tree,
    get_safetensors_metadata,
    snapshot_download,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from modelpool.checkpoint.bundled import bundled_names, bundled_root
from modelpool.checkpoint.cache_dir import expanded
from modelpool.errors import ConfigError

if TYPE_CHECKING:
    from modelpool.checkpoint.headers import Header

_HUB_FILES = ["*.json", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja"]
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_NOT_OURS = ["*/*", "consolidated*"]  # other formats of the same weights: never download twice
_NO_WEIGHTS = (
    "has no *.safetensors and no *.gguf: other weight formats are not read; load the model with "
    "transformers and save_pretrained it"
)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def resolve_source(
    source: str, *, field: str, revision: str | None = None, remote_code: bool = False
) -> Path:
    """Return the directory of a checkpoint.

    `field` is the member's place, such as `pool.models[1]`. `remote_code` fetches the repository's
    Python files too. Raises `ConfigError` for `{field}.source`.
    """
    scheme, separator, rest = source.partition(":")
    if source.startswith(("/", ".", "~")):
        directory = _local(source, field)
    elif separator and scheme == "path":
        directory = _local(rest, field)
    elif separator and scheme == "bundled":
        directory = _bundled(rest, field)
    elif separator and scheme == "hub":
        directory = _hub(rest, revision, remote_code, field)
    else:
        raise _error(
            field,
            f"cannot read {source!r}: write bundled:NAME, path:DIR, gguf:FILE, hub:ORG/NAME, "
            f"ngram, quantised:TARGET, or a path that starts with '/', '.' or '~'{_likely(source)}",
        )
    _check_config(directory, field)
    if not any(directory.glob("*.safetensors")):
        raise _error(field, f"{str(directory)!r} {_NO_WEIGHTS}")
    return directory


def resolve_description(
    source: str, *, field: str, revision: str | None = None, remote_code: bool = False
) -> Path | None:
    """Return the directory of a hub repository, without its weights; None for GGUF files.

    The arguments and errors are those of `resolve_source`.
    """
    repository = source.removeprefix("hub:")
    directory = _hub(repository, revision, remote_code, field, weights=False)
    endings = _endings(repository, revision, directory)
    if ".safetensors" not in endings:
        if ".gguf" in endings:
            return None
        raise _error(field, f"{repository!r} {_NO_WEIGHTS}")
    _check_config(directory, field)
    return directory


def resolve_headers(
    source: str, *, field: str, revision: str | None = None, remote_code: bool = False
) -> tuple[Path, list[Header] | None]:
    """Return the directory of a checkpoint, like `resolve_source`, without fetching hub weights.

    If these are not in the local cache, the headers of their files come with the directory.
    """
    from modelpool.checkpoint.headers import has_weights  # imports PyTorch

    if not source.startswith("hub:"):
        return resolve_source(source, field=field), None
    repository = source.removeprefix("hub:")
    directory = _hub(repository, revision, remote_code, field, weights=False)
    with hub_faults(repository, revision, field):
        if has_weights(directory):
            return directory, None
        files = get_safetensors_metadata(repository, revision=revision).files_metadata.values()
    return directory, [
        {name: {"dtype": one.dtype, "shape": one.shape} for name, one in file.tensors.items()}
        for file in files
    ]


def _likely(source: str) -> str:
    """Return a suggestion for a source without a scheme, or nothing."""
    if Path(source).is_dir():
        return f"; did you mean path:{source}?"
    if _REPOSITORY.fullmatch(source):
        return f"; did you mean hub:{source}?"
    return ""


def _bundled(name: str, field: str) -> Path:
    available = bundled_names()
    if name not in available:
        listed = ", ".join(available) or "none"
        raise _error(field, f"no bundled model {name!r}; available: {listed}")
    return bundled_root() / name


def _local(text: str, field: str) -> Path:
    directory = expanded(text)
    if directory.is_file():
        raise _error(field, f"{str(directory)!r} is a file: give the folder of a checkpoint")
    if not directory.is_dir():
        raise _error(
            field,
            f"no directory {str(directory.absolute())!r}: give a directory that save_pretrained "
            "wrote, or hub:ORG/NAME to download one",
        )
    return directory.resolve()


def _hub(
    repository: str, revision: str | None, remote_code: bool, field: str, weights: bool = True
) -> Path:
    patterns = [*_HUB_FILES, *["*.safetensors"] * weights, *["*.py"] * remote_code]
    with hub_faults(repository, revision, field):  # the library shows a progress bar on a terminal
        path = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, ignore_patterns=_NOT_OURS
        )
    return Path(path)


def _endings(repository: str, revision: str | None, directory: Path) -> set[str]:
    """Return the suffixes of a repository's files; of safetensors only if they would be fetched."""
    try:
        names = [one.path for one in get_cached_repo_tree(repository, revision=revision)]
    except CachedRepoTreeNotFoundError:  # an old cache, without the network
        names = [str(one.relative_to(directory)) for one in directory.rglob("*")]
        if not any(one.endswith(".gguf") for one in names):
            return {".safetensors"}
    ours = [one for one in names if one.endswith(".gguf") or "/" not in one]
    return {Path(one).suffix for one in ours if not one.startswith("consolidated")}


@contextmanager
def hub_faults(repository: str, revision: str | None, field: str) -> Iterator[None]:
    """Convert errors of the hub's library within it to `ConfigError`."""
    named = f"{repository!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        yield
    except ConfigError:
        raise
    except HFValidationError as error:
        reason = f"{repository!r} is not ORG/NAME or ORG/NAME:QUANT: {error}"
        raise _error(field, reason) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{field}.revision", f"the hub has no {named}") from error
    except GatedRepoError as error:
        raise _error(
            field, f"{named} is gated: accept its licence on the hub and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise _error(
            field, f"the hub has no {named}; if it is private, run `hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, RevisionResolutionError) as error:
        cause = " ".join(str(error.__cause__ or error).split())
        reason = f"the hub cannot be reached ({cause}): check the connection"
        if constants.HF_HUB_OFFLINE:
            names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
            name = next((one for one in names if os.environ.get(one)), names[0])
            reason = f"{name} is set: unset it to download it"
        raise _error(
            field, f"{named} is not in the local cache, and {reason}, or give a path"
        ) from error
    except NotASafetensorsRepoError as error:
        raise _error(field, f"{named} {_NO_WEIGHTS}") from error
    except Exception as error:  # no network, an HTTP error: classes of many libraries
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise _error(
                field,
                f"no room for {named} in {constants.HF_HUB_CACHE} ({error.strerror}): free some, "
                "or set HF_HOME to a folder on another disk",
            ) from error
        raise _error(field, f"cannot download {named}: {' '.join(str(error).split())}") from error


def _check_config(directory: Path, field: str) -> None:
    if not (directory / "config.json").is_file():
        reason = f"{str(directory)!r} has no config.json: not a checkpoint"
        files = sorted(file.name for file in directory.glob("*.gguf"))
        if files:
            reason += f"; it has GGUF files, to be given by name: {', '.join(files)}"
        raise _error(field, reason)


def _error(field: str, reason: str) -> ConfigError:
    return ConfigError(f"{field}.source", reason)
