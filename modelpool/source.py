"""Where a member's files are: a source string becomes a local directory.

    bundled:NAME        weights that came with this package
    path:DIR, /DIR, ./DIR, ~/DIR    a checkpoint as `save_pretrained` writes it
    hub:ORG/NAME        a repository of the Hugging Face hub, at `revision`

The source `ngram` has no files: `ModelPool` never resolves it.

A hub repository is downloaded here, at construction, so that a missing model is an error of the
configuration and not of a request. Only safetensors, JSON and tokenizer files are fetched.
With HF_HUB_OFFLINE set, only the local cache is read.
"""

import re
from importlib import resources
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from modelpool.errors import ConfigError

_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_NOT_OURS = ["*/*", "consolidated*"]  # other formats of the same weights: never download twice


def resolve_source(
    source: str, *, field: str, revision: str | None = None, remote_code: bool = False
) -> Path:
    """The directory of a checkpoint.

    `field` is the member's place, such as `pool.models[1]`. `remote_code` fetches the
    repository's Python files too. Raises `ConfigError` for `{field}.source`.
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
            f"cannot read {source!r}: write bundled:NAME, path:DIR, hub:ORG/NAME, ngram, "
            f"or a path that starts with '/', '.' or '~'{_likely(source)}",
        )
    _check_checkpoint(directory, field)
    return directory


def _likely(source: str) -> str:
    """What may have been meant by a source without a scheme."""
    if Path(source).is_dir():
        return f"; did you mean path:{source}?"
    if _REPOSITORY.fullmatch(source):
        return f"; did you mean hub:{source}?"
    return ""


def bundled_names() -> tuple[str, ...]:
    """The names that `bundled:` accepts."""
    root = _bundled_root()
    if not root.is_dir():
        return ()
    return tuple(sorted(entry.parent.name for entry in root.glob("*/config.json")))


def _bundled_root() -> Path:
    return Path(str(resources.files("modelpool") / "bundled"))


def _bundled(name: str, field: str) -> Path:
    available = bundled_names()
    if name not in available:
        listed = ", ".join(available) or "none"
        raise _error(field, f"no bundled model {name!r}; available: {listed}")
    return _bundled_root() / name


def _local(text: str, field: str) -> Path:
    directory = Path(text).expanduser()
    if not directory.is_dir():
        raise _error(
            field,
            f"no directory {str(directory)!r}: give a directory that save_pretrained wrote, "
            "or hub:ORG/NAME to download one",
        )
    return directory.resolve()


def _hub(repository: str, revision: str | None, remote_code: bool, field: str) -> Path:
    patterns = [*_HUB_FILES, "*.py"] if remote_code else _HUB_FILES
    named = f"{repository!r}" + (f" at revision {revision!r}" if revision else "")
    try:  # the library shows a progress bar on a terminal
        path = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, ignore_patterns=_NOT_OURS
        )
    except HFValidationError as error:
        raise _error(field, f"{repository!r} is not a repository id ORG/NAME: {error}") from error
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
    except LocalEntryNotFoundError as error:
        raise _error(
            field,
            f"{named} is not in the local cache and the hub cannot be reached: download it "
            "while online (unset HF_HUB_OFFLINE), or give path:DIR",
        ) from error
    except OSError as error:  # no network, a full disk, an HTTP error
        raise _error(field, f"cannot download {named}: {error}") from error
    return Path(path)


def _check_checkpoint(directory: Path, field: str) -> None:
    if not (directory / "config.json").is_file():
        raise _error(field, f"{str(directory)!r} has no config.json: not a checkpoint")
    if not any(directory.glob("*.safetensors")):
        raise _error(
            field,
            f"{str(directory)!r} has no *.safetensors: other weight formats are not read; load "
            "the model with transformers and save_pretrained it",
        )


def _error(field: str, reason: str) -> ConfigError:
    return ConfigError(f"{field}.source", reason)
