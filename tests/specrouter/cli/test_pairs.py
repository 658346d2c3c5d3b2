"""`specrouter pairs` says of every model on the machine why it may draft, or why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from modelpool import drafters
from modelpool.drafters import Candidate, candidates, find_target, picked
from modelpool.errors import ConfigError
from modelpool.member import Member
from specrouter import LLM, Speculation
from specrouter.cli.main import main
from specrouter.target import Given, asked_of
from test_support.factories import save_llama
from test_support.hub_server import serving_hub
from tests.modelpool.gguf.files import save, write

TARGET = "Qwen/Qwen3-4B"
TABLE = """\
drafter                  parameters   reads     ms  of target
Qwen/Qwen3-4B                  0.2M  0.7 MB   7.39             target
someone/fits                   0.0M  0.0 MB   0.31         4%  fits
Qwen/Qwen3-0.6B                0.0M  0.1 MB   0.82        11%  fits; --draft auto takes it
Qwen/Qwen3-4B                                                  no: it is the target itself
someone/damaged                                                no: 'CACHE/models--someone--damaged/snapshots/c0ffee/model.safetensors' is incomplete (0.0 of 0.0 MB): download it again
someone/larger                 0.3M  1.4 MB  13.97       189%  no: it reads 189% of what the target reads for a token: nothing to gain
someone/other-tokenizer        0.0M  0.0 MB   0.31         4%  no: the tokenizer of 'someone/other-tokenizer' is not that of the target 'Qwen/Qwen3-4B': 320 ids and 321 ids; a pool shares one tokenizer
someone/quantised              0.0M  0.0 MB   0.31         4%  no: its weights are quantised by a method that is only known to run once it is loaded
someone/refused                                                no: it is an encoder-decoder model; only decoders are supported
someone/unfinished                                             no: its download is not finished
ms: of a token, by the 0.1 GB/s at which this CPU reads memory
not here, of Qwen3: Qwen/Qwen3-1.7B
"""  # noqa: E501


class Cache:
    """The hub's, as it lies on a disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, name: str, hidden: int = 16, layers: int = 1, commit: str = "c0ffee") -> Path:
        folder = self.root / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / commit
        save_llama(snapshot, hidden=hidden, layers=layers, heads=2, kv_heads=2, dtype="float32")
        (folder / "blobs").mkdir()
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
        return snapshot


def changed(path: Path, **settings: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Nine models, of which two fit."""
    cache = Cache(tmp_path_factory.mktemp("hub"))
    cache.add(TARGET, hidden=64, layers=4)
    cache.add("Qwen/Qwen3-0.6B", hidden=32)
    cache.add("someone/fits")
    cache.add("someone/larger", hidden=64, layers=8)
    other = cache.add("someone/other-tokenizer")
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save(str(other / "tokenizer.json"))
    changed(cache.add("someone/refused"), is_encoder_decoder=True)
    damaged = cache.add("someone/damaged") / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    (cache.add("someone/unfinished") / "model.safetensors").unlink()
    (cache.root / "models--someone--unfinished" / "blobs" / "abc.incomplete").touch()
    changed(cache.add("someone/quantised"), quantization_config={"quant_method": "bitsandbytes"})
    # A download that was begun again, and one of a single revision.
    (cache.root / "models--someone--fits" / "blobs" / "abc.incomplete").touch()
    shutil.rmtree(cache.root / "models--someone--larger" / "refs")
    return cache


@pytest.fixture(autouse=True)
def in_use(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache.root))


def found() -> list[Candidate]:
    return candidates(find_target(f"hub:{TARGET}", "TARGET"))


def test_every_model_of_a_cache_is_listed_with_its_reason(
    cache: Cache, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelpool.fast.memory_speed.read_bytes_per_s", lambda: 1e8)
    monkeypatch.setattr("modelpool.checkpoint.source.snapshot_download", None)  # not asked
    assert main(["pairs", TARGET]) == 0
    shown = capsys.readouterr().out.replace(str(cache.root), "CACHE")
    assert shown == TABLE
    assert len(found()) == 9


@pytest.mark.parametrize("odd", [RuntimeError("no\nsuch thing"), RecursionError("deep")])
def test_a_model_that_cannot_be_looked_at_refuses_itself_alone(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, odd: Exception
) -> None:
    real = drafters._open

    def opened(name: str, source: str) -> Member:
        if name == "someone/fits":
            raise odd
        return real(name, source)

    monkeypatch.setattr(drafters, "_open", opened)
    (one,) = [one for one in found() if one.name == "someone/fits"]
    reason = " ".join(str(odd).split())
    assert one.refusal == f"cannot be read: {type(odd).__name__}: {reason}"
    taken = picked(found())
    assert taken is not None
    assert taken.name == "Qwen/Qwen3-0.6B"


def test_a_sibling_is_taken_before_what_is_smaller(cache: Cache) -> None:
    taken = picked(found())
    assert taken is not None
    assert (taken.name, taken.is_sibling) == ("Qwen/Qwen3-0.6B", True)
    others = [one for one in found() if not one.is_sibling]
    taken = picked(others)
    assert taken is not None
    assert taken.name == "someone/fits"
    assert picked([one for one in others if one.refusal]) is None


def test_folders_are_looked_through_beside_the_target_and_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, hidden in (("here/big one", 64), ("here/small", 16), ("there/deep/small", 16)):
        save_llama(tmp_path / name, hidden=hidden, layers=1, heads=2, kv_heads=2, dtype="float32")
    target = find_target(f"path:{tmp_path}/here/big one", "TARGET")
    fitting = [
        one.path for one in candidates(target, [tmp_path / "there" / "deep"]) if not one.refusal
    ]
    assert {tmp_path / "here" / "small", tmp_path / "there" / "deep" / "small"} <= {*fitting}
    assert main(["pairs", str(tmp_path / "here" / "big one"), "--folder", "/none"]) == 2
    assert capsys.readouterr().err == "specrouter: --folder: no directory '/none'\n"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("some/model", "TARGET: 'some/model' is not in the local cache: hf download some/model"),
        ("nothing", "TARGET: 'nothing' is no folder, no ORG/NAME"),
        ("./none", "TARGET: no directory "),
        ("~nobody-here/x", "TARGET: no directory "),
    ],
)
def test_a_target_that_is_not_here_is_one_line(
    target: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pairs", target]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"specrouter: {reason}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_a_file_that_is_none_is_a_reason_and_ends_nothing(tmp_path: Path, file: str) -> None:
    for name, hidden in (("big", 64), ("small", 16)):
        save_llama(tmp_path / name, hidden=hidden, layers=1, heads=2, kv_heads=2, dtype="float32")
    whole = tmp_path / "small" / "model.safetensors"
    if "index" in file:  # which is not looked at beside a single file
        whole.rename(whole.with_name("model-00001-of-00001.safetensors"))
    for content in ("", "{", "[]", '{"weight_map": 3}', '{"model_type": 4}'):
        (tmp_path / "small" / file).write_text(content)
        found = candidates(find_target(f"path:{tmp_path}/big", "TARGET"))
        [small] = [one for one in found if one.path == tmp_path / "small"]
        assert small.refusal, content


def test_auto_takes_what_is_listed_and_texts_are_those_without_it(cache: Cache) -> None:
    path = f"{cache.root}/models--Qwen--Qwen3-4B/snapshots/c0ffee"
    models = asked_of(Given(target=path, draft=["auto", "ngram"])).config.pool.models
    assert [one.name for one in models] == [TARGET, "Qwen/Qwen3-0.6B", "ngram"]
    texts = []
    for draft in ("auto", None):
        with LLM(path, draft=draft, max_requests=2) as llm:
            assert ("Qwen/Qwen3-0.6B" in llm.router.pool.names) == (draft == "auto")
            name = "Qwen/Qwen3-0.6B" if draft else "ngram"
            chain = Speculation((name, TARGET))
            [text] = llm.generate("ab", speculation=chain, temperature=1.0, seed=1, max_tokens=24)
            texts.append(text.token_ids)
    assert texts[0] == texts[1]


def test_a_target_that_is_not_here_is_described_by_the_hub_only_for_auto(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def described(source: str, field: str, **_: object) -> Path:
        asked.append(source)
        raise ConfigError(f"{field}.source", "the hub cannot be reached")

    monkeypatch.setattr(drafters, "resolve_description", described)
    monkeypatch.setattr("modelpool.source_check.resolve_description", described)
    monkeypatch.setattr("modelpool.source_check.resolve_description", described)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match="TARGET: 'a/b' is not in the local cache"):
        find_target("hub:a/b", "TARGET")
    assert asked == []
    with pytest.raises(ConfigError, match="target: the hub cannot be reached"):
        asked_of(Given(target="a/b", draft=["auto"]))
    assert asked == ["hub:a/b"]


def test_auto_without_a_drafter_leaves_the_text_itself(tmp_path: Path) -> None:
    path = save_llama(tmp_path / "only" / "model", hidden=8, layers=1, heads=1, kv_heads=1)
    for draft in (["auto"], ["auto", "ngram"]):
        models = asked_of(Given(target=str(path), draft=draft)).config.pool.models
        assert [one.source for one in models[1:]] == ["ngram"]


@pytest.fixture
def ggufs(tmp_path: Path) -> Path:
    """A folder with two GGUF files, and what is no model or not whole."""
    folder = tmp_path / "files"
    folder.mkdir()
    for name, hidden in (("big", 64), ("small", 32)):
        save("qwen2", tmp_path / name, hidden=hidden)
        write("qwen2", tmp_path / name, folder / f"{name}-Q8_0.gguf", "Q8_0")
    for name in ("mmproj-small-f16.gguf", "half-Q8_0-00001-of-00002.gguf"):
        shutil.copy(folder / "small-Q8_0.gguf", folder / name)
    return folder


def test_the_small_one_of_two_gguf_files_drafts_for_the_large_one(ggufs: Path) -> None:
    big = ggufs / "big-Q8_0.gguf"
    found = candidates(find_target(f"gguf:{big}", "TARGET"), [ggufs])
    told = {one.path.name: one.refusal for one in found if one.path.parent == ggufs}
    assert told == {"small-Q8_0.gguf": None, "big-Q8_0.gguf": "it is the target itself"}
    models = asked_of(Given(target=str(big), draft=["auto"])).config.pool.models
    small = f"gguf:{ggufs}/small-Q8_0.gguf"
    assert [one.source for one in models] == [f"gguf:{big}", small, "ngram"]


def test_gguf_files_of_the_hub_s_cache_are_named_as_serve_takes_them(
    ggufs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--org--both-GGUF" / "snapshots" / "c0ffee"
    snapshot.parent.mkdir(parents=True)
    ggufs.rename(snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("c0ffee")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (snapshot / "small-Q8_0.gguf").rename(snapshot / "small-Q4_K_M.gguf")
    for asked in ("org/both-GGUF:q8_0", "org/both-GGUF:Q8_0"):
        target = find_target(f"hub:{asked}", "TARGET")
        assert target.config.source == f"gguf:{snapshot}/big-Q8_0.gguf"
        told = {one.name: one.refusal for one in candidates(target)}
        assert told["org/both-GGUF:Q4_K_M"] is None
        assert told["org/both-GGUF:Q8_0"] == "it is the target itself"
        assert len(told) == 2
    assert find_target("hub:org/both-GGUF", "TARGET").config.source.endswith("small-Q4_K_M.gguf")
    with pytest.raises(ConfigError, match="TARGET: 'org/both-GGUF:Q2_K' is not in the local cache"):
        find_target("hub:org/both-GGUF:Q2_K", "TARGET")


def test_a_target_that_auto_has_to_download_is_shown(
    ggufs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("specrouter.progress.is_live", lambda _: True)
    with serving_hub(tmp_path / "hub") as hub:
        hub.files["org/big-GGUF"] = {"big-Q8_0.gguf": (ggufs / "big-Q8_0.gguf").read_bytes()}
        for is_shown in (True, False):  # then it is in the cache
            asked_of(Given(target="org/big-GGUF:Q8_0", draft=["auto"]))
            shown = capsys.readouterr().err
            assert ("downloading org/big-GGUF:Q8_0, 0." in shown) == is_shown
        assert hub.transfers == ["big-Q8_0.gguf from 0"]
