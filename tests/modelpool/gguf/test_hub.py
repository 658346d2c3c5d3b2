"""GGUF files of a hub: which one is meant, and what is said where it cannot be had."""

from __future__ import annotations

import errno
import hashlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from huggingface_hub import constants, file_download

from modelpool.checkpoint.source import resolve_description
from modelpool.gguf import hub as module
from modelpool.gguf.hub import find_gguf, tag_of
from modelpool.progress import LoadProgress
from test_support.factories import pool_of
from test_support.hub_server import Hub, serving_hub
from tests.modelpool.gguf.files import save, write
from tests.modelpool.refused import refused

FIELD = "pool.models[0]"
REPOSITORY = "org/Small-GGUF"
DATA = bytes(range(256)) * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Without waiting between the library's own tries."""
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    with serving_hub(tmp_path / "hub") as hub:
        hub.files[REPOSITORY] = {f"small-{tag}.gguf": DATA for tag in ("f16", "Q4_K_M", "q8_0")}
        yield hub


def fetch(
    asked: str = f"{REPOSITORY}:Q4_K_M",
    progress: LoadProgress | None = None,
    revision: str | None = None,
    asks_hub: bool = True,
) -> Path:
    found = find_gguf(f"hub:{asked}", field=FIELD, revision=revision, asks_hub=asks_hub)
    found.download(progress)
    return found.file


def incomplete(hub: Hub) -> list[Path]:
    return list(hub.cache.glob("*/blobs/*.incomplete"))


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-fp16", "fp16"),
        ("model.i1-IQ4_XS", "IQ4_XS"),
        ("UD/Qwen3-8B-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4", "mxfp4"),
        ("BF16/some-BF16", "BF16"),
        ("Q4_K_M", "Q4_K_M"),
        ("folder/model", "model"),
    ],
)
def test_a_file_s_tag_is_how_its_name_ends(name: str, tag: str) -> None:
    assert tag_of(name) == tag


SPLIT = [f"Q8_0/big-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("names", "tag", "first"),
    [
        (["a-Q4_K_M.gguf", "a-Q8_0.gguf"], ":q8_0", "a-Q8_0.gguf"),
        (["a-q4_k_m.gguf"], ":Q4_K_M", "a-q4_k_m.gguf"),
        (["a-BF16.gguf", "a-Q4_0.gguf", "a-Q4_K_M.gguf"], "", "a-Q4_K_M.gguf"),
        (["a-BF16.gguf", "a-IQ4_XS.gguf", "a-Q8_0.gguf"], "", "a-IQ4_XS.gguf"),
        (["a-Q5_K_M.gguf", "a-Q8_0.gguf"], "", "a-Q5_K_M.gguf"),
        (["a-UD-Q4_K_XL.gguf", "b-Q4_K_XL.gguf"], ":Q4_K_XL", "b-Q4_K_XL.gguf"),
        (["a-UD-Q4_K_XL.gguf", "a-Q8_0.gguf"], ":Q4_K_XL", "a-UD-Q4_K_XL.gguf"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], ":b-Q8_0.gguf", "b-Q8_0.gguf"),
        (["mmproj-a-Q4_K_M.gguf", "a-imatrix-Q4_K_M.gguf", "z-Q4_K_M.gguf"], "", "z-Q4_K_M.gguf"),
        ([*SPLIT, "README.md"], "", SPLIT[0]),
    ],
)  # fmt: skip
def test_a_tag_chooses_a_model_and_all_of_its_files_are_fetched(
    names: list[str], tag: str, first: str, hub: Hub
) -> None:
    hub.files[REPOSITORY] = {name: name.encode() for name in names}
    file = fetch(REPOSITORY + tag)
    assert file.read_bytes() == first.encode()
    assert str(file).endswith(f"/{first}")
    assert len(hub.transfers) == (3 if first in SPLIT else 1)
    if first in SPLIT:
        assert {one.name for one in file.parent.iterdir()} == {Path(one).name for one in SPLIT}
    before = len(hub.transfers)
    assert fetch(REPOSITORY + tag) == file
    assert len(hub.transfers) == before, "it is in the cache"


@pytest.mark.parametrize(
    ("names", "asked", "reason"),
    [
        (["a-Q8_0.gguf", "a-Q4_0.gguf"], ":Q4_K_M", "has no 'Q4_K_M' among .*; it has Q4_0, Q8_0$"),
        (["a.safetensors"], ":Q4_K_M", "'org/Small-GGUF' has no GGUF files: leave out ':Q4_K_M'$"),
        (["README.md"], ":Q4_K_M", "'org/Small-GGUF' has no GGUF files$"),
        (SPLIT[:2], ":Q8_0", "has no GGUF files"),
        ([], "/x:Q8_0", "is not ORG/NAME or ORG/NAME:QUANT"),
        ([], "-other:Q8_0", "the hub has no 'org/Small-GGUF-other:Q8_0'; if it is private"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(
    names: list[str], asked: str, reason: str, hub: Hub
) -> None:
    hub.files[REPOSITORY] = dict.fromkeys(names, b"")
    with refused(f"{FIELD}.source", reason):
        fetch(REPOSITORY + asked)


def test_a_gated_repository_says_what_to_do(hub: Hub) -> None:
    hub.is_gated = True
    with refused(f"{FIELD}.source", "is gated: accept its licence .* `hf auth login`"):
        fetch()


def test_a_revision_that_is_not_there_is_named(hub: Hub) -> None:
    with refused(f"{FIELD}.revision", "at revision 'v9'"):
        fetch(revision="v9")


def test_a_repository_without_a_tag_is_known_by_its_files(hub: Hub) -> None:
    assert resolve_description(f"hub:{REPOSITORY}", field=FIELD) is None
    hub.files["org/other"] = {"model.bin": b"", "config.json": b"{}"}
    with refused(f"{FIELD}.source", r"has no \*.safetensors and no \*.gguf"):
        resolve_description("hub:org/other", field=FIELD)
    hub.files["org/both"] = {"model.safetensors": b"", "a-Q4_0.gguf": b"", "config.json": b"{}"}
    assert resolve_description("hub:org/both", field=FIELD) is not None


# Downloads


def test_a_download_that_broke_off_goes_on_where_it_did(hub: Hub) -> None:
    hub.breaks_at = 4000
    with refused(f"{FIELD}.source", "small-Q4_K_M.gguf broke off at .* the next try goes on"):
        fetch()
    [part] = incomplete(hub)
    assert part.read_bytes() == DATA[:4000]
    hub.breaks_at = None
    hub.requests.clear()
    assert fetch().read_bytes() == DATA
    assert hub.transfers == ["small-Q4_K_M.gguf from 4000"]
    assert incomplete(hub) == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (DATA[::-1], "has the SHA-256 .*, and the hub lists .* removed; try again"),
        (DATA + b"more", "has 10244 bytes, and the hub lists 10240: .* removed; try again"),
    ],
)
def test_other_bytes_than_the_hub_lists_do_not_get_into_the_cache(
    damage: bytes, reason: str, hub: Hub
) -> None:
    hub.damage = damage
    with refused(f"{FIELD}.source", reason):
        fetch()
    assert incomplete(hub) == []
    assert not list(hub.cache.rglob("*.gguf"))
    hub.damage = None
    assert fetch().read_bytes() == DATA


@pytest.mark.parametrize("has_hashes", [True, False])
def test_the_log_says_what_was_checked(
    has_hashes: bool, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "modelpool")
    hub.has_hashes = has_hashes
    fetch()
    assert ("lists no SHA-256" in caplog.text) != has_hashes
    assert ("its SHA-256 is the one that" in caplog.text) == has_hashes


def test_a_disk_that_is_full_is_named_and_the_next_try_goes_on(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filling(url: str, stream: BinaryIO, **options: Any) -> None:
        class Full:
            def write(self, data: bytes) -> None:
                if stream.tell():
                    raise OSError(errno.ENOSPC, "No space left on device")
                stream.write(data)

        file_download.http_get(url, Full(), **options)  # type: ignore[arg-type]

    reason = f"no room for '{REPOSITORY}:Q4_K_M' in {hub.cache} .*set HF_HOME"
    with monkeypatch.context() as patch, refused(f"{FIELD}.source", reason):
        patch.setattr(module, "http_get", filling)
        fetch()
    hub.requests.clear()
    assert fetch().read_bytes() == DATA
    assert hub.transfers == ["small-Q4_K_M.gguf from 1000"]


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3))
    with refused(f"{FIELD}.source", "no room for .* GB are to come, and 0.00 GB are free"):
        fetch()
    assert hub.transfers == []


def test_a_file_that_is_too_large_for_the_library_says_how_to_get_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(DATA) - 1)
    with refused(f"{FIELD}.source", f"`hf download {REPOSITORY} small-Q4_K_M.gguf`"):
        fetch()
    assert hub.transfers == []
    assert incomplete(hub) == []


def test_progress_counts_bytes_of_all_parts(hub: Hub) -> None:
    hub.files[REPOSITORY] = {name: DATA[:-1] + bytes([i]) for i, name in enumerate(SPLIT)}
    counted = list[tuple[int, int]]()

    class Told(LoadProgress):
        def count(self, done_bytes: int, total_bytes: int) -> None:
            super().count(done_bytes, total_bytes)
            counted.append((done_bytes, total_bytes))

    progress = Told()
    progress.begin("downloading", "big")
    fetch(REPOSITORY, progress=progress)
    assert [done for done, _ in counted] == sorted(done for done, _ in counted)
    assert {len(DATA), 2 * len(DATA), 3 * len(DATA)} <= {done for done, _ in counted}
    assert {total for _, total in counted} == {3 * len(DATA)}
    assert str(progress.step) == "downloading big, 0.0 of 0.0 MB"


# Without the hub


@pytest.mark.parametrize("how", ["offline", "unreachable", "down", "cache"])
def test_what_is_cached_is_found_without_the_hub(
    how: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = fetch(f"{REPOSITORY}:q8_0")
    told = {
        "offline": "HF_HUB_OFFLINE is set: unset it",
        "cache": "`specrouter serve` downloads it",
    }
    reason = told.get(how, r"the hub cannot be reached \(.*\): check the connection")
    fetched = partial(fetch, asks_hub=how != "cache")
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "unreachable":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    elif how == "down":
        hub.is_down = True
    hub.requests.clear()
    assert fetched(f"{REPOSITORY}:Q8_0") == fetched(REPOSITORY) == file
    for asked in (f"{REPOSITORY}:Q4_K_M", "org/other:Q8_0"):
        with refused(f"{FIELD}.source", f"'{asked}' is not in the local cache.*{reason}"):
            fetched(asked)
    assert hub.transfers == []


def test_a_model_of_the_hub_is_served_from_all_of_its_parts(hub: Hub, tmp_path: Path) -> None:
    save("llama", tmp_path / "m")
    write("llama", tmp_path / "m", tmp_path / "m-Q8_0.gguf", "Q8_0", split=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    hub.files[REPOSITORY] = {one.name: one.read_bytes() for one in parts}
    pool = pool_of(f"hub:{REPOSITORY}")
    assert [one.name for one in pool.files("m")] == [one.name for one in parts]
    assert hashlib.sha256(pool.files("m")[0].read_bytes()).digest()
    assert pool.opened("m").source == f"hub:{REPOSITORY}", "as receipts name it"
    assert pool.get("m").parameter_count > 0
