"""Sources become directories, or errors that say what to do. No network is used."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from modelpool import source as module
from modelpool.errors import ConfigError
from modelpool.source import bundled_names, resolve_source

FIELD = "pool.models[3]"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def reason_of(source: str, field: str = f"{FIELD}.source", **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_source(source, field=FIELD, **options)
    assert caught.value.field == field
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
    assert "config.json" in reason_of(str(tmp_path))
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert "safetensors" in reason_of(str(checkpoint))


def test_an_unknown_scheme_is_answered_with_the_known_ones() -> None:
    for source in ("Qwen/Qwen3-8B", "http://example.org/model", "bundle:x"):
        assert "hub:ORG/NAME" in reason_of(source)


def test_a_source_without_a_scheme_is_answered_with_what_was_meant(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    assert reason_of(name).endswith(f"did you mean hub:{name}?")
    monkeypatch.chdir(checkpoint.parent.parent)
    folder = f"{checkpoint.parent.name}/model"
    assert reason_of(folder).endswith(f"did you mean path:{folder}?")
    for other in ("Qwen3-8B", "http://example.org/model", "bundle:x", "a/b/c"):
        assert "did you mean" not in reason_of(other)


def test_bundled_names_are_listed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_bundled_root", lambda: checkpoint.parent)
    assert bundled_names() == ("model",)
    assert resolve_source("bundled:model", field=FIELD) == checkpoint
    assert "available: model" in reason_of("bundled:other")
    assert "available: model" in reason_of("bundled:../model")


def test_a_hub_repository_is_fetched_at_its_revision(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(checkpoint)

    monkeypatch.setattr(module, "snapshot_download", download)
    assert resolve_source("hub:org/name", field=FIELD, revision="v1") == checkpoint
    assert (asked["repository"], asked["revision"]) == ("org/name", "v1")
    assert not any("bin" in p or "py" in p for p in asked["allow_patterns"])


def test_a_hub_model_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(repository: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(module, "snapshot_download", offline)
    assert "HF_HUB_OFFLINE" in reason_of("hub:org/name")
    monkeypatch.undo()
    assert "ORG/NAME" in reason_of("hub:a/b/c")  # refused before any connection
