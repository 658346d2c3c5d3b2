"""Sources become directories, or errors that say what to do. No network is used."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    SafetensorsParsingError,
)

from modelpool.checkpoint import source as module
from modelpool.checkpoint.bundled import bundled_names
from modelpool.checkpoint.source import resolve_headers, resolve_source
from modelpool.errors import ConfigError
from tests.modelpool.hub_headers import repository_headers
from tests.modelpool.refused import refused

FIELD = "pool.models[3]"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def reason_of(source: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_source(source, field=FIELD)
    assert caught.value.field == f"{FIELD}.source"
    return caught.value.reason


def test_a_path_may_be_written_in_four_ways(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    for source in (f"path:{checkpoint}", str(checkpoint), "./model", "~/model", "path:model"):
        assert resolve_source(source, field=FIELD) == checkpoint.resolve()


def test_what_is_not_a_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    assert "no directory" in reason_of(f"path:{tmp_path}/absent")
    assert str(Path.cwd() / "absent") in reason_of("./absent")
    assert "config.json" in reason_of(str(tmp_path))
    (tmp_path / "m.gguf").touch()
    assert "by name: m.gguf" in reason_of(str(tmp_path))
    assert "is a file" in reason_of(str(checkpoint / "config.json"))
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert "safetensors" in reason_of(str(checkpoint))


def test_a_source_without_a_scheme_is_answered_with_what_was_meant(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    assert reason_of(name).endswith(f"did you mean hub:{name}?")
    monkeypatch.chdir(checkpoint.parent.parent)
    folder = f"{checkpoint.parent.name}/model"
    assert reason_of(folder).endswith(f"did you mean path:{folder}?")
    for other in ("Qwen3-8B", "http://example.org/model", "bundle:x", "a/b/c"):
        reason = reason_of(other)
        assert "did you mean" not in reason
        assert "hub:ORG/NAME" in reason, "the known schemes are told"


# A repository of the hub


TENSORS = {"a.weight": ("BF16", [2, 3]), "b.weight": ("F32", [])}
HEADERS = [{name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in TENSORS.items()}]


def test_bundled_names_are_listed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("source", "bundled"):
        place = f"modelpool.checkpoint.{name}.bundled_root"
        monkeypatch.setattr(place, lambda: checkpoint.parent)
    assert bundled_names() == ("model",)
    assert resolve_source("bundled:model", field=FIELD) == checkpoint
    assert "available: model" in reason_of("bundled:other")
    assert "available: model" in reason_of("bundled:../model")


class Hub:
    """A repository: what is in the local cache, and what was asked for."""

    def __init__(self, cached: Path) -> None:
        self.cached = cached
        self.patterns: list[str] = []
        self.downloads: list[tuple[str, str | None]] = []
        self.headers_of: list[tuple[str, str | None]] = []
        self.fault: Exception | None = None

    def download(self, repository: str, **options: Any) -> str:
        self.downloads.append((repository, options["revision"]))
        self.patterns = options["allow_patterns"]
        return str(self.cached)

    def headers(self, repository: str, revision: str | None = None) -> Any:
        self.headers_of.append((repository, revision))
        if self.fault is not None:
            raise self.fault
        return repository_headers(TENSORS)


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(checkpoint)
    monkeypatch.setattr(module, "snapshot_download", hub.download)
    monkeypatch.setattr(module, "get_safetensors_metadata", hub.headers)
    return hub


def test_a_hub_repository_is_fetched_at_its_revision(hub: Hub) -> None:
    assert resolve_source("hub:org/name", field=FIELD, revision="v1") == hub.cached
    assert hub.downloads == [("org/name", "v1")]
    assert not any("bin" in p or "py" in p for p in hub.patterns)
    assert {"*.safetensors", "*.json", "*.jinja"} <= set(hub.patterns)


def test_a_hub_model_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = mock.Mock(side_effect=LocalEntryNotFoundError("no route"))
    monkeypatch.setattr(module, "snapshot_download", missing)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    reason = reason_of("hub:org/name")
    assert "cannot be reached (no route): check the connection" in reason
    assert "HF_HUB_OFFLINE" not in reason, "it is not set"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in reason_of("hub:org/name")
    monkeypatch.undo()
    assert "ORG/NAME" in reason_of("hub:a/b/c")  # refused before any connection


def test_headers_of_a_hub_repository_are_had_without_its_weights(hub: Hub) -> None:
    (hub.cached / "model.safetensors").unlink()
    found = resolve_headers("hub:org/name", field=FIELD, revision="v1")
    assert found == (hub.cached, HEADERS)
    assert hub.headers_of == [("org/name", "v1")]
    assert {"*.json", "tokenizer*"} <= set(hub.patterns)
    assert not {"*.safetensors", "*.py"} & set(hub.patterns)
    resolve_headers("hub:org/name", field=FIELD, remote_code=True)
    assert "*.py" in hub.patterns


def test_weights_in_the_local_cache_are_read_there(hub: Hub) -> None:
    assert resolve_headers("hub:org/name", field=FIELD) == (hub.cached, None)
    (hub.cached / "model.safetensors").unlink()
    parts = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    index = {"metadata": {}, "weight_map": parts}
    (hub.cached / "model.safetensors.index.json").write_text(json.dumps(index))
    (hub.cached / "model-1.safetensors").touch()
    assert resolve_headers("hub:org/name", field=FIELD) == (hub.cached, HEADERS)
    (hub.cached / "model-2.safetensors").touch()
    assert resolve_headers("hub:org/name", field=FIELD) == (hub.cached, None)


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        (NotASafetensorsRepoError("none"), "other weight formats"),
        (SafetensorsParsingError("no header"), "no header"),
        (OfflineModeIsEnabled("offline"), "not in the local cache"),
        (RuntimeError("connection reset"), "cannot download 'org/name': connection reset"),
    ],
)
def test_headers_that_cannot_be_had_name_the_source(fault: Exception, word: str, hub: Hub) -> None:
    (hub.cached / "model.safetensors").unlink()
    hub.fault = fault
    with refused(f"{FIELD}.source", word):
        resolve_headers("hub:org/name", field=FIELD)
